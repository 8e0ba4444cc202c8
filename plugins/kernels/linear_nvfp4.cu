#include "linear_nvfp4.cuh"
#include "linear_packed_wide.cuh"
#include "unpack_weight.cuh"

namespace trt_eagle3 {
namespace {

template <typename Params>
PackedWeight packed_weight(const Params& p) {
  const auto* data = reinterpret_cast<const char*>(p.weight);
  return {data, p.scale, reinterpret_cast<const uint8_t*>(p.row_scale), p.inner, p.outer, p.inner / 16, 0, 0};
}

}  // namespace

cudaError_t linear_nvfp4(const LinearNvfp4Params& p, cudaStream_t stream) {
  if (p.num_rows > kMaxPackedRows || p.dtype == DType::kFloat32) return cudaErrorNotSupported;
  if (p.num_rows == 0 || p.outer == 0) return cudaSuccess;
  const LinearParams base = {p.x, p.weight, p.y, p.num_rows, p.inner, p.outer, p.dtype, p.prefetch_safe};
  if (p.dtype == DType::kFloat16) return launch_linear_packed<Nvfp4Weight<__half>>(base, packed_weight(p), stream);
  return launch_linear_packed<Nvfp4Weight<__nv_bfloat16>>(base, packed_weight(p), stream);
}

cudaError_t unpack_nvfp4(const UnpackNvfp4Params& p, cudaStream_t stream) {
  if (p.dtype == DType::kFloat32) return cudaErrorNotSupported;
  if (p.outer == 0) return cudaSuccess;
  if (p.dtype == DType::kFloat16) return launch_unpack_weight<Nvfp4Weight<__half>>(packed_weight(p), p.out, stream);
  return launch_unpack_weight<Nvfp4Weight<__nv_bfloat16>>(packed_weight(p), p.out, stream);
}

}  // namespace trt_eagle3
