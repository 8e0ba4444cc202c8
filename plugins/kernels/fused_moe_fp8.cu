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
  if (!moe_supported(p)) return cudaErrorNotSupported;
  if (p.num_rows == 0) return cudaSuccess;
  MoeTask task = moe_task(p, workspace);
  task.gate_up =
      fp8_experts(p.gate_up, p.gate_up_scale, 2 * p.width, p.hidden, p.gate_up_scale_rows, p.gate_up_scale_columns);
  task.down = fp8_experts(p.down, p.down_scale, p.hidden, p.width, p.down_scale_rows, p.down_scale_columns);
  if (p.dtype == DType::kFloat16) return launch_moe<Fp8Weight<__half>>(task, stream);
  return launch_moe<Fp8Weight<__nv_bfloat16>>(task, stream);
}

}  // namespace trt_eagle3
