// The kernel of PickRows: rows of a matrix, copied.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace trt_eagle3 {

// y[b R + r] = x[b S + rows[b, r]]; a row outside [0, S) is the nearest one, because a builder times on any content.
struct PickRowsParams {
  const void* x;        // [batch * num_new, row_bytes]
  const int32_t* rows;  // [batch, num_rows]
  void* y;              // [batch * num_rows, row_bytes]
  int32_t batch, num_new, num_rows, row_bytes;
};

cudaError_t pick_rows(const PickRowsParams& params, cudaStream_t stream);

}  // namespace trt_eagle3
