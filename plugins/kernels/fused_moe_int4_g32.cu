#include "fused_moe_int4.cuh"

namespace trt_eagle3 {
TRT_EAGLE3_INSTANTIATE_MOE_INT4(4)
}  // namespace trt_eagle3
