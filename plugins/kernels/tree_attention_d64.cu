#include "tree_launch.cuh"

namespace trt_eagle3 {
TRT_EAGLE3_INSTANTIATE_TREE(64)
}  // namespace trt_eagle3
