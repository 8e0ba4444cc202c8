#include "linear_int4.cuh"

namespace trt_eagle3 {

template <>
cudaError_t linear_int4_groups<1>(const LinearParams& p, const PackedWeight& w, cudaStream_t stream);
template <>
cudaError_t linear_int4_groups<2>(const LinearParams& p, const PackedWeight& w, cudaStream_t stream);
template <>
cudaError_t linear_int4_groups<4>(const LinearParams& p, const PackedWeight& w, cudaStream_t stream);
template <>
cudaError_t unpack_int4_groups<1>(const PackedWeight& w, DType dtype, void* out, cudaStream_t stream);
template <>
cudaError_t unpack_int4_groups<2>(const PackedWeight& w, DType dtype, void* out, cudaStream_t stream);
template <>
cudaError_t unpack_int4_groups<4>(const PackedWeight& w, DType dtype, void* out, cudaStream_t stream);

namespace {

template <typename Params>
PackedWeight packed_weight(const Params& p) {
  const auto* data = reinterpret_cast<const char*>(p.weight);
  const auto* zero = static_cast<const uint8_t*>(p.zero_point);
  return {data, p.scale, zero, p.inner, p.outer, p.inner / p.group, 0, p.scale_dtype == DType::kBFloat16};
}

}  // namespace

cudaError_t linear_int4(const LinearInt4Params& p, cudaStream_t stream) {
  if (p.num_rows > kMaxPackedRows || p.dtype == DType::kFloat32) return cudaErrorNotSupported;
  if (p.num_rows == 0 || p.outer == 0) return cudaSuccess;
  const LinearParams base = {p.x, p.weight, p.y, p.num_rows, p.inner, p.outer, p.dtype, p.prefetch_safe};
  const PackedWeight w = packed_weight(p);
  if (p.group == 128) return linear_int4_groups<1>(base, w, stream);
  return p.group == 64 ? linear_int4_groups<2>(base, w, stream) : linear_int4_groups<4>(base, w, stream);
}

cudaError_t unpack_int4(const UnpackInt4Params& p, cudaStream_t stream) {
  if (p.dtype == DType::kFloat32) return cudaErrorNotSupported;
  if (p.outer == 0) return cudaSuccess;
  const PackedWeight w = packed_weight(p);
  if (p.group == 128) return unpack_int4_groups<1>(w, p.dtype, p.out, stream);
  return p.group == 64 ? unpack_int4_groups<2>(w, p.dtype, p.out, stream)
                       : unpack_int4_groups<4>(w, p.dtype, p.out, stream);
}

}  // namespace trt_eagle3
