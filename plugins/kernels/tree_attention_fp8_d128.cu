#include "tree_launch.cuh"

namespace trt_eagle3 {
TRT_EAGLE3_INSTANTIATE_TREE_FP8(128)
}  // namespace trt_eagle3
