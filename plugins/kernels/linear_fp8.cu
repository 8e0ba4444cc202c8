#include "linear_byte.cuh"

namespace trt_eagle3 {

cudaError_t linear_fp8(const LinearFp8Params& p, cudaStream_t stream) { return linear_byte<Fp8Weight>(p, stream); }
cudaError_t unpack_fp8(const UnpackFp8Params& p, cudaStream_t stream) { return unpack_byte<Fp8Weight>(p, stream); }

}  // namespace trt_eagle3
