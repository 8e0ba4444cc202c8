#include <algorithm>

#include "pick_rows.h"

namespace trt_eagle3 {
namespace {

// A block per picked row; rows of 16-byte multiples go by 16 bytes, others by two.
template <typename Piece>
__global__ void pick_rows_kernel(const PickRowsParams p) {
  const int picked = blockIdx.x;
  const int row = min(max(p.rows[picked], 0), p.num_new - 1);
  const int pieces = p.row_bytes / static_cast<int>(sizeof(Piece));
  const int64_t source = static_cast<int64_t>(picked / p.num_rows) * p.num_new + row;
  const Piece* from = static_cast<const Piece*>(p.x) + source * pieces;
  Piece* to = static_cast<Piece*>(p.y) + static_cast<int64_t>(picked) * pieces;
  for (int i = threadIdx.x; i < pieces; i += blockDim.x) to[i] = from[i];
}

}  // namespace

cudaError_t pick_rows(const PickRowsParams& p, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(p.batch) * p.num_rows;
  if (blocks == 0 || p.row_bytes == 0) return cudaSuccess;
  if (p.row_bytes % 16 == 0) {
    pick_rows_kernel<uint4><<<static_cast<unsigned>(blocks), 256, 0, stream>>>(p);
  } else {
    pick_rows_kernel<uint16_t><<<static_cast<unsigned>(blocks), 256, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace trt_eagle3
