// Launches of FusedMoe with INT4 experts: one translation unit per group size instantiates them.
#pragma once

#include "moe_launch.cuh"

namespace trt_eagle3 {

// Columns that share a scale: 128 / kGroups.
template <int kGroups>
cudaError_t moe_int4_groups(const MoeTask& task, DType dtype, cudaStream_t stream);

#define TRT_EAGLE3_INSTANTIATE_MOE_INT4(kGroups)                                                     \
  template <>                                                                                        \
  cudaError_t moe_int4_groups<kGroups>(const MoeTask& task, DType dtype, cudaStream_t stream) {      \
    if (dtype == DType::kFloat16) return launch_moe<Int4Weight<__half, kGroups>>(task, stream);      \
    return launch_moe<Int4Weight<__nv_bfloat16, kGroups>>(task, stream);                             \
  }

}  // namespace trt_eagle3
