#include "tree_launch.cuh"

namespace trt_eagle3 {
TRT_EAGLE3_INSTANTIATE_TREE(96)
}  // namespace trt_eagle3
