#include "linear_packed_wide.cuh"
#include "unpack_weight.cuh"

namespace trt_eagle3 {
namespace {

// Row n of a weight has the scales of row n >> shift.
template <typename Params>
PackedWeight packed_weight(const Params& p) {
  const int shift = p.scale_rows == p.outer ? 0 : p.scale_rows == 1 ? 31 : 7;
  const auto* data = static_cast<const char*>(p.weight);
  return {data, p.scale, nullptr, p.inner, p.outer, p.scale_columns, shift, 0};
}

}  // namespace

cudaError_t linear_fp8(const LinearFp8Params& p, cudaStream_t stream) {
  if (p.num_rows > kMaxLinearRows || p.dtype == DType::kFloat32) return cudaErrorNotSupported;
  if (p.num_rows == 0 || p.outer == 0) return cudaSuccess;
  const LinearParams base = {p.x, p.weight, p.y, p.num_rows, p.inner, p.outer, p.dtype, p.prefetch_safe};
  if (p.dtype == DType::kFloat16) return launch_linear_packed<Fp8Weight<__half>>(base, packed_weight(p), stream);
  return launch_linear_packed<Fp8Weight<__nv_bfloat16>>(base, packed_weight(p), stream);
}

cudaError_t unpack_fp8(const UnpackFp8Params& p, cudaStream_t stream) {
  if (p.dtype == DType::kFloat32) return cudaErrorNotSupported;
  if (p.outer == 0) return cudaSuccess;
  if (p.dtype == DType::kFloat16) return launch_unpack_weight<Fp8Weight<__half>>(packed_weight(p), p.out, stream);
  return launch_unpack_weight<Fp8Weight<__nv_bfloat16>>(packed_weight(p), p.out, stream);
}

}  // namespace trt_eagle3
