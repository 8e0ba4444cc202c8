#include "tree_launch.cuh"

namespace trt_eagle3 {
TRT_EAGLE3_INSTANTIATE_TREE_FP8(64)
}  // namespace trt_eagle3
