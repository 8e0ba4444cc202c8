#include "add_layer_norm.cuh"
#include "add_rms_norm.cuh"
#include "kv_move.cuh"
#include "qk_norm_mrope_prompt.cuh"
#include "silu_mul.cuh"

namespace trt_eagle3 {

cudaError_t qk_norm_mrope(const QKNormMRopeParams& params, cudaStream_t stream) {
  return launch_qk_norm_mrope(params, stream);
}

cudaError_t add_rms_norm(const AddRmsNormParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  return with_dtype(params.dtype, [&](auto t) { return launch_add_rms_norm<decltype(t)>(params, stream); });
}

cudaError_t add_layer_norm(const AddLayerNormParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  return with_dtype(params.dtype, [&](auto t) { return launch_add_layer_norm<decltype(t)>(params, stream); });
}

cudaError_t silu_mul(const SiluMulParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  return with_dtype(params.dtype, [&](auto t) { return launch_silu_mul<decltype(t)>(params, stream); });
}

cudaError_t kv_move(const KVMoveParams& params, cudaStream_t stream) { return launch_kv_move(params, stream); }

}  // namespace trt_eagle3
