// KV move: copies rows of a cache to other rows in every layer, as if all rows were read before any is written.
//
// Idea: no two columns of a row meet, so a block takes a strip of columns narrow enough that the strip of every moved
// row fits in shared memory: read all, synchronise, write all. One launch covers all planes (layers, keys and values).
// Bytes moved: 2 * planes * moves * row_bytes. Measured: docs/measurements.md, "Kernels".
#pragma once

#include "common.cuh"

namespace trt_eagle3 {

constexpr int kMoveSharedBytes = 40 * 1024;

// Slot of `row` of sequence `b`, -1 where there is none.
__device__ __forceinline__ int64_t move_slot(const KVMoveParams& p, int b, int row) {
  if (row < 0) return -1;
  if (p.page_table == nullptr) return row < p.slots ? row : -1;
  const int page = row / p.page_size;
  if (page >= p.pages_per_row) return -1;
  return static_cast<int64_t>(p.page_table[static_cast<int64_t>(b) * p.pages_per_row + page]) * p.page_size + row -
         page * p.page_size;
}

// grid (strips, planes); dynamic shared memory: int64 source and destination per move, then the strips.
__global__ void __launch_bounds__(256) kv_move_kernel(const KVMoveParams p, int strip_packs) {
  wait_for_previous();
  extern __shared__ __align__(16) char shared[];
  const int moves = p.batch * p.num_moves;
  int64_t* source = reinterpret_cast<int64_t*>(shared);
  int64_t* destination = source + moves;
  uint4* strips = reinterpret_cast<uint4*>(destination + moves);
  for (int i = threadIdx.x; i < moves; i += 256) {
    const int64_t from = move_slot(p, i / p.num_moves, p.source[i]);
    const int64_t to = move_slot(p, i / p.num_moves, p.destination[i]);
    const bool moved = from >= 0 && to >= 0 && from != to;
    source[i] = moved ? from : -1;
    destination[i] = moved ? to : -1;
  }
  __syncthreads();
  const int row_packs = p.row_bytes / 16;
  const int first = blockIdx.x * strip_packs;
  uint4* plane = static_cast<uint4*>(p.cache) + static_cast<int64_t>(blockIdx.y) * p.slots * row_packs + first;
  const int width = min(strip_packs, row_packs - first);
  for (int i = threadIdx.x; i < moves * width; i += 256) {
    const int move = i / width, column = i - move * width;
    if (source[move] >= 0) strips[move * strip_packs + column] = plane[source[move] * row_packs + column];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < moves * width; i += 256) {
    const int move = i / width, column = i - move * width;
    if (source[move] >= 0) plane[destination[move] * row_packs + column] = strips[move * strip_packs + column];
  }
}

inline cudaError_t launch_kv_move(const KVMoveParams& p, cudaStream_t stream) {
  const int moves = p.batch * p.num_moves;
  if (moves == 0 || p.planes == 0) return cudaSuccess;
  if (moves > kMaxKVMoves || p.row_bytes % 16 != 0) return cudaErrorInvalidValue;
  const int row_packs = p.row_bytes / 16;
  int strip_packs = kMoveSharedBytes / (moves * 16);
  strip_packs = strip_packs < 1 ? 1 : strip_packs > 32 ? 32 : strip_packs;
  if (strip_packs > row_packs) strip_packs = row_packs;
  const int bytes = moves * (16 + strip_packs * 16);
  const cudaError_t error =
      cudaFuncSetAttribute(kv_move_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 80 * 1024);
  if (error != cudaSuccess) return error;
  return launch(Overlap::kYes, kv_move_kernel, dim3(ceil_div(row_packs, strip_packs), p.planes), 256, bytes, 1, stream,
                p, strip_packs);
}

}  // namespace trt_eagle3
