#include "linear_packed.cuh"
#include "linear_packed_wide.cuh"
#include "unpack_weight.cuh"

namespace trt_eagle3 {
namespace {

template <typename Params>
PackedWeight packed_weight(const Params& p) {
  const auto* data = reinterpret_cast<const char*>(p.weight);
  const auto* zero = static_cast<const uint8_t*>(p.zero_point);
  return {data, p.scale, zero, p.inner, p.outer, p.inner / p.group, 0, p.scale_dtype == DType::kBFloat16};
}

// Calls `f` with the Format of the weight.
template <typename T, typename F>
cudaError_t with_group(int group, bool zeros, F f) {
  switch (kPackedSpan / group) {
    case 1:
      return zeros ? f(Int4Weight<T, 1, true>{}) : f(Int4Weight<T, 1, false>{});
    case 2:
      return zeros ? f(Int4Weight<T, 2, true>{}) : f(Int4Weight<T, 2, false>{});
    case 4:
      return zeros ? f(Int4Weight<T, 4, true>{}) : f(Int4Weight<T, 4, false>{});
  }
  return cudaErrorNotSupported;
}

template <typename Params, typename F>
cudaError_t with_format(const Params& p, F f) {
  const bool zeros = p.zero_point != nullptr;
  if (p.dtype == DType::kFloat16) return with_group<__half>(p.group, zeros, f);
  if (p.dtype == DType::kBFloat16) return with_group<__nv_bfloat16>(p.group, zeros, f);
  return cudaErrorNotSupported;
}

}  // namespace

cudaError_t linear_int4(const LinearInt4Params& p, cudaStream_t stream) {
  if (p.num_rows > kMaxLinearRows) return cudaErrorNotSupported;
  if (p.num_rows == 0 || p.outer == 0) return cudaSuccess;
  Chip chip;
  if (const cudaError_t error = Chip::current(&chip); error != cudaSuccess) return error;
  const LinearParams base = {p.x, p.weight, p.y, p.num_rows, p.inner, p.outer, p.dtype, p.prefetch_safe};
  const PackedWeight w = packed_weight(p);
  return with_format(p, [&](auto format) {
    using Format = decltype(format);
    if (base.num_rows <= 8) return run_linear_packed<Format, 1>(base, w, chip, stream);
    const cudaError_t error =
        base.num_rows <= 16 ? run_linear_packed<Format, 2>(base, w, chip, stream) : cudaErrorNotSupported;
    return error != cudaErrorNotSupported ? error : launch_linear_packed_wide<Format>(base, w, chip, stream);
  });
}

cudaError_t unpack_int4(const UnpackInt4Params& p, cudaStream_t stream) {
  if (p.outer == 0) return cudaSuccess;
  const PackedWeight w = packed_weight(p);
  return with_format(p, [&](auto format) { return launch_unpack_weight<decltype(format)>(w, p.out, stream); });
}

}  // namespace trt_eagle3
