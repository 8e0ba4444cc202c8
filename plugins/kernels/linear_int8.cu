#include "linear_byte.cuh"

namespace trt_eagle3 {

cudaError_t linear_int8(const LinearInt8Params& p, cudaStream_t stream) { return linear_byte<Int8Weight>(p, stream); }
cudaError_t unpack_int8(const UnpackInt8Params& p, cudaStream_t stream) { return unpack_byte<Int8Weight>(p, stream); }

}  // namespace trt_eagle3
