// Launches of FusedMoe: one translation unit for each form of the experts' weights instantiates them.
#pragma once

#include "moe_decode.cuh"

namespace trt_eagle3 {

constexpr int kMoeMaxRows = 64;

// Everything but weights. Workspace: the inner values.
template <typename Params>
MoeTask moe_task(const Params& p, void* workspace) {
  MoeTask task = {};
  task.x = p.x;
  task.router_logits = p.router_logits;
  task.inner = workspace;
  task.out = p.y;
  task.num_rows = p.num_rows;
  task.num_experts = p.num_experts;
  task.top_k = p.top_k;
  task.hidden = p.hidden;
  task.width = p.width;
  task.renormalise = p.renormalise;
  return task;
}

template <typename Params>
cudaError_t moe_workspace(const Params& p, size_t* bytes) {
  *bytes = (static_cast<size_t>(p.num_rows) * p.top_k * p.width * 2 + 15) / 16 * 16;
  return cudaSuccess;
}

template <typename Params>
bool moe_supported(const Params& p) {
  return p.dtype != DType::kFloat32 && p.num_rows <= kMoeMaxRows && p.num_rows * p.top_k <= kMoeMaxSlots;
}

}  // namespace trt_eagle3
