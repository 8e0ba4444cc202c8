// Launches of FusedMoe: one translation unit for each form of the experts' weights instantiates them.
#pragma once

#include "moe_decode.cuh"
#include "moe_wide.cuh"

namespace trt_eagle3 {

constexpr int kMoeFewRows = 64;  // that moe_decode.cuh takes

template <typename Params>
bool moe_has_few_rows(const Params& p) {
  return p.num_rows <= kMoeFewRows && p.num_rows * p.top_k <= kMoeMaxSlots;
}

template <typename Params>
cudaError_t moe_workspace(const Params& p, size_t* bytes) {
  const size_t inner = (static_cast<size_t>(p.num_rows) * p.top_k * p.width * 2 + 15) / 16 * 16;
  *bytes = moe_has_few_rows(p) ? inner : MoeWorkspace::at(p, nullptr).bytes;
  return cudaSuccess;
}

// With few rows, the workspace holds the inner values alone.
template <typename Params>
MoeTask moe_task(const Params& p, const ExpertWeight& gate_up, const ExpertWeight& down, void* workspace) {
  MoeTask task = {};
  task.x = p.x;
  task.router_logits = p.router_logits;
  task.inner = workspace;
  task.out = p.y;
  task.gate_up = gate_up;
  task.down = down;
  task.num_rows = p.num_rows;
  task.num_experts = p.num_experts;
  task.top_k = p.top_k;
  task.hidden = p.hidden;
  task.width = p.width;
  task.renormalise = p.renormalise;
  return task;
}

template <typename Format, typename Params>
cudaError_t launch_moe(const Params& p, const ExpertWeight& gate_up, const ExpertWeight& down, void* workspace,
                       cudaStream_t stream) {
  Chip chip;
  if (const cudaError_t error = Chip::current(&chip); error != cudaSuccess) return error;
  if (moe_has_few_rows(p)) return launch_moe_few<Format>(moe_task(p, gate_up, down, workspace), chip, stream);
  if (!moe_wide_supported(p, chip)) return cudaErrorNotSupported;
  return launch_moe_wide<Format>(p, gate_up, down, workspace, chip, stream);
}

// Of T float16 or bfloat16; Format<T> is the weights' form.
template <template <typename> class Format, typename Params>
cudaError_t launch_moe_of(const Params& p, const ExpertWeight& gate_up, const ExpertWeight& down, void* workspace,
                          cudaStream_t stream) {
  if (p.dtype == DType::kFloat32) return cudaErrorNotSupported;
  if (p.num_rows == 0) return cudaSuccess;
  if (p.dtype == DType::kFloat16) return launch_moe<Format<__half>>(p, gate_up, down, workspace, stream);
  return launch_moe<Format<__nv_bfloat16>>(p, gate_up, down, workspace, stream);
}

}  // namespace trt_eagle3
