// What stands between TensorRT's inputs and TreeAttention in two cases: a builder times plugins on inputs of any
// content, and a mask may come as int32, for versions that have no boolean plugin inputs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace trt_eagle3 {

// Sizes as in params.h. Whoever writes no copy gives null for it.
struct TreeInputs {
  const int32_t* past_lengths;   // [B]
  const int32_t* query_lengths;  // [B]
  const int32_t* page_table;     // [B, P]
  const int32_t* mask;           // [B, S, M], or null
  int32_t* safe_past_lengths;    // clamped to the row's slots, or null with the next two
  int32_t* safe_query_lengths;   // clamped to S
  int32_t* safe_page_table;      // clamped to the cache's pages
  uint8_t* bool_mask;            // 0 or 1; null exactly when mask is
  int32_t batch, num_new, tail, pages_per_row, page_size, num_pages;
};

cudaError_t make_tree_inputs(const TreeInputs& inputs, cudaStream_t stream);

}  // namespace trt_eagle3
