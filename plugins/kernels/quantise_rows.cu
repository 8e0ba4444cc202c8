#include "quantise_rows.cuh"

namespace trt_eagle3 {
namespace {

// Calls `f` with a value of T, which is no float32.
template <typename F>
cudaError_t with_half(DType dtype, F f) {
  if (dtype == DType::kFloat32) return cudaErrorNotSupported;
  return dtype == DType::kFloat16 ? f(__half{}) : f(__nv_bfloat16{});
}

}  // namespace

cudaError_t quantise_rows(const QuantiseRowsParams& p, cudaStream_t stream) {
  return with_half(p.dtype, [&](auto t) {
    using T = decltype(t);
    return quantise(RowSource<T>{static_cast<const T*>(p.x)}, QuantiseTarget::of(p), stream);
  });
}

cudaError_t quantise_silu_mul(const QuantiseSiluMulParams& p, cudaStream_t stream) {
  return with_half(p.dtype, [&](auto t) {
    using T = decltype(t);
    return quantise(SiluSource<T>{static_cast<const T*>(p.gate_up)}, QuantiseTarget::of(p), stream);
  });
}

cudaError_t quantise_add_rms_norm(const QuantiseAddRmsNormParams& p, cudaStream_t stream) {
  return with_half(p.dtype, [&](auto t) {
    using T = decltype(t);
    const NormSource<T> source = {static_cast<const T*>(p.x), static_cast<const T*>(p.residual),
                                  static_cast<const T*>(p.weight), static_cast<T*>(p.sum), p.epsilon};
    return quantise(source, QuantiseTarget::of(p), stream);
  });
}

}  // namespace trt_eagle3
