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
  const ExpertWeight gate_up = dense_experts(p.gate_up, 2 * p.width, p.hidden);
  const ExpertWeight down = dense_experts(p.down, p.hidden, p.width);
  return launch_moe_of<DenseWeight>(p, gate_up, down, workspace, stream);
}

}  // namespace trt_eagle3
