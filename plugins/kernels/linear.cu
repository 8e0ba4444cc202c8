#include "linear.cuh"

namespace trt_eagle3 {

cudaError_t linear(const LinearParams& params, cudaStream_t stream) {
  if (params.num_rows == 0 || params.outer == 0) return cudaSuccess;
  return with_dtype(params.dtype, [&](auto t) { return launch_linear<decltype(t)>(params, stream); });
}

}  // namespace trt_eagle3
