// Launches of FusedMoe with INT4 experts: one translation unit per group size instantiates them.
#pragma once

#include "moe_launch.cuh"

namespace trt_eagle3 {

// Columns that share a scale: 128 / kGroups.
template <int kGroups>
cudaError_t moe_int4_groups(const FusedMoeInt4Params& p, const ExpertWeight& gate_up, const ExpertWeight& down,
                            void* workspace, cudaStream_t stream);

#define TRT_EAGLE3_INSTANTIATE_MOE_INT4(kGroups)                                                               \
  template <typename T>                                                                                        \
  using Int4GroupsWeight = Int4Weight<T, kGroups>;                                                             \
  template <>                                                                                                  \
  cudaError_t moe_int4_groups<kGroups>(const FusedMoeInt4Params& p, const ExpertWeight& gate_up,               \
                                       const ExpertWeight& down, void* workspace, cudaStream_t stream) {       \
    return launch_moe_of<Int4GroupsWeight>(p, gate_up, down, workspace, stream);                               \
  }

}  // namespace trt_eagle3
