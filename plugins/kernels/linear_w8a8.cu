#include "linear_w8a8.cuh"

namespace trt_eagle3 {

cudaError_t linear_w8a8(const LinearW8A8Params& p, cudaStream_t stream) {
  if (p.dtype == DType::kFloat32) return cudaErrorNotSupported;
  if (p.num_rows == 0 || p.outer == 0) return cudaSuccess;
  return p.integers ? launch_linear_w8a8<Code8>(p, stream) : launch_linear_w8a8<E4m3>(p, stream);
}

}  // namespace trt_eagle3
