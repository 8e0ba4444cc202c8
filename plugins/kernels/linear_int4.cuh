// Launches of products with INT4 weights: one translation unit per group size instantiates them.
#pragma once

#include "linear_packed_wide.cuh"
#include "unpack_weight.cuh"

namespace trt_eagle3 {

// Columns that share a scale: 128 / kGroups.
template <int kGroups>
cudaError_t linear_int4_groups(const LinearParams& p, const PackedWeight& w, cudaStream_t stream);
template <int kGroups>
cudaError_t unpack_int4_groups(const PackedWeight& w, DType dtype, void* out, cudaStream_t stream);

#define TRT_EAGLE3_INSTANTIATE_INT4(kGroups)                                                                    \
  template <>                                                                                                   \
  cudaError_t linear_int4_groups<kGroups>(const LinearParams& p, const PackedWeight& w, cudaStream_t stream) {  \
    if (p.dtype == DType::kFloat16) return launch_linear_packed<Int4Weight<__half, kGroups>>(p, w, stream);     \
    return launch_linear_packed<Int4Weight<__nv_bfloat16, kGroups>>(p, w, stream);                              \
  }                                                                                                             \
  template <>                                                                                                   \
  cudaError_t unpack_int4_groups<kGroups>(const PackedWeight& w, DType dtype, void* out, cudaStream_t stream) { \
    if (dtype == DType::kFloat16) return launch_unpack_weight<Int4Weight<__half, kGroups>>(w, out, stream);     \
    return launch_unpack_weight<Int4Weight<__nv_bfloat16, kGroups>>(w, out, stream);                            \
  }

}  // namespace trt_eagle3
