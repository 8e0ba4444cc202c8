// Launches of products with weights of a byte a number, and of their unpacking.
#pragma once

#include "linear_packed_wide.cuh"
#include "unpack_weight.cuh"

namespace trt_eagle3 {

// Row n of a weight has the scales of row n >> shift.
template <typename Params>
PackedWeight byte_weight(const Params& p) {
  const int shift = p.scale_rows == p.outer ? 0 : p.scale_rows == 1 ? 31 : 7;
  const auto* data = reinterpret_cast<const char*>(p.weight);
  return {data, p.scale, nullptr, p.inner, p.outer, p.scale_columns, shift, 0};
}

template <template <typename> typename Weight, typename Params>
cudaError_t linear_byte(const Params& p, cudaStream_t stream) {
  if (p.num_rows > kMaxPackedRows || p.dtype == DType::kFloat32) return cudaErrorNotSupported;
  if (p.num_rows == 0 || p.outer == 0) return cudaSuccess;
  const LinearParams base = {p.x, p.weight, p.y, p.num_rows, p.inner, p.outer, p.dtype, p.prefetch_safe};
  if (p.dtype == DType::kFloat16) return launch_linear_packed<Weight<__half>>(base, byte_weight(p), stream);
  return launch_linear_packed<Weight<__nv_bfloat16>>(base, byte_weight(p), stream);
}

template <template <typename> typename Weight, typename Params>
cudaError_t unpack_byte(const Params& p, cudaStream_t stream) {
  if (p.dtype == DType::kFloat32) return cudaErrorNotSupported;
  if (p.outer == 0) return cudaSuccess;
  if (p.dtype == DType::kFloat16) return launch_unpack_weight<Weight<__half>>(byte_weight(p), p.out, stream);
  return launch_unpack_weight<Weight<__nv_bfloat16>>(byte_weight(p), p.out, stream);
}

}  // namespace trt_eagle3
