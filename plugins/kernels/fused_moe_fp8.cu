#include "moe_launch.cuh"

namespace trt_eagle3 {
namespace {

ExpertWeight fp8_experts(const void* data, const float* scale, int outer, int inner, int rows, int columns) {
  const int shift = rows == outer ? 0 : rows == 1 ? 31 : 7;
  const PackedWeight first = {static_cast<const char*>(data), scale, nullptr, inner, outer, columns, shift, 0};
  return {first, int64_t{outer} * inner, int64_t{4} * rows * columns, 0};
}

}  // namespace

cudaError_t fused_moe_fp8_workspace(const FusedMoeFp8Params& p, size_t* bytes) { return moe_workspace(p, bytes); }

cudaError_t fused_moe_fp8(const FusedMoeFp8Params& p, void* workspace, size_t, cudaStream_t stream) {
  const ExpertWeight gate_up =
      fp8_experts(p.gate_up, p.gate_up_scale, 2 * p.width, p.hidden, p.gate_up_scale_rows, p.gate_up_scale_columns);
  const ExpertWeight down =
      fp8_experts(p.down, p.down_scale, p.hidden, p.width, p.down_scale_rows, p.down_scale_columns);
  return launch_moe_of<Fp8Weight>(p, gate_up, down, workspace, stream);
}

}  // namespace trt_eagle3
