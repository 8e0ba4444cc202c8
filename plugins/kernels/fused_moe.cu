#include "moe_launch.cuh"

namespace trt_eagle3 {
namespace {

ExpertWeight dense_experts(const void* data, int outer, int inner) {
  const PackedWeight first = {static_cast<const char*>(data), nullptr, nullptr, inner, outer, 1, 0, 0};
  return {first, int64_t{2} * outer * inner, 0, 0};
}

}  // namespace

cudaError_t fused_moe_workspace(const FusedMoeParams& p, size_t* bytes) { return moe_workspace(p, bytes); }

cudaError_t fused_moe(const FusedMoeParams& p, void* workspace, size_t, cudaStream_t stream) {
  if (!moe_supported(p)) return cudaErrorNotSupported;
  if (p.num_rows == 0) return cudaSuccess;
  MoeTask task = moe_task(p, workspace);
  task.gate_up = dense_experts(p.gate_up, 2 * p.width, p.hidden);
  task.down = dense_experts(p.down, p.hidden, p.width);
  if (p.dtype == DType::kFloat16) return launch_moe<DenseWeight<__half>>(task, stream);
  return launch_moe<DenseWeight<__nv_bfloat16>>(task, stream);
}

}  // namespace trt_eagle3
