#include <algorithm>

#include "tree_inputs.h"

namespace trt_eagle3 {
namespace {

__device__ int clamped(int x, int low, int high) { return min(max(x, low), high); }

__global__ void tree_inputs_kernel(const TreeInputs in) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  if (in.safe_past_lengths != nullptr) {
    for (int64_t i = first; i < in.batch; i += stride) {
      in.safe_past_lengths[i] = clamped(in.past_lengths[i], 0, in.pages_per_row * in.page_size);
      in.safe_query_lengths[i] = clamped(in.query_lengths[i], 0, in.num_new);
    }
    for (int64_t i = first; i < static_cast<int64_t>(in.batch) * in.pages_per_row; i += stride) {
      in.safe_page_table[i] = clamped(in.page_table[i], 0, in.num_pages - 1);
    }
  }
  if (in.mask == nullptr) return;
  for (int64_t i = first; i < static_cast<int64_t>(in.batch) * in.num_new * in.tail; i += stride) {
    in.bool_mask[i] = in.mask[i] != 0;
  }
}

}  // namespace

cudaError_t make_tree_inputs(const TreeInputs& in, cudaStream_t stream) {
  const int64_t most =
      std::max<int64_t>(in.mask != nullptr ? static_cast<int64_t>(in.num_new) * in.tail : 0, in.pages_per_row) *
      in.batch;
  const int blocks = static_cast<int>(std::clamp<int64_t>((most + 255) / 256, 1, 1024));
  tree_inputs_kernel<<<blocks, 256, 0, stream>>>(in);
  return cudaGetLastError();
}

}  // namespace trt_eagle3
