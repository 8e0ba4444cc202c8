// Linear: y = x . W^T for a few tokens, where reading W is all the time there is. This file: up to 16 tokens whose part
// of x fits into shared memory; linear_wide.cuh: the others, up to 64.
//
// Idea: each lane loads the 16-byte pieces of W that it multiplies straight into registers (both operands of a product
// may be permuted alike along K), two spans ahead, so 64 to 128 KiB a multiprocessor are on their way at any time and
// no thread waits for another; where x is too wide, a cluster splits K; and the first spans, which need no x, start
// before the launch before has finished. Bytes moved: N * K * sizeof(T) of weights + x and y. Measured:
// docs/measurements.md, "Big pairs on one H200".
//
// The parts of K (warps, then blocks of the cluster) are added in a fixed order that does not depend on the number of
// tokens up to 8, nor from 9 to 16: the same token gives the same bits alone and among others.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>

#include "chip.cuh"
#include "cluster_room.cuh"
#include "common.cuh"
#include "linear_wide.cuh"

namespace trt_eagle3 {

constexpr int kLinearWarps = 16;
constexpr int kLinearThreads = 32 * kLinearWarps;
constexpr int kLinearRows = 16;   // rows of W per tile
constexpr int kLinearSpan = 128;  // columns of W that a warp loads at once
constexpr int kLinearAhead = 2;   // spans of a warp on their way
constexpr int kLinearSteps = kLinearSpan / 32;
constexpr int kLinearPitch = 20;                // floats between the tokens of a partial sum: no bank conflicts
constexpr int kLinearSharedBytes = 160 * 1024;  // of a block: loads on their way take what is left of the L1 cache
constexpr int kLinearMaxSlots = 8;              // tiles of each block between two meetings of its cluster

// Columns of W, in whole spans, of each block of a cluster.
__host__ __device__ constexpr int linear_columns(int inner, int size) {
  return ceil_div(ceil_div(inner, kLinearSpan), size) * kLinearSpan;
}

// A block's share of the launch.
struct LinearShare {
  int first_tile, tile_stride, num_tiles;
  int first_column, end_column, rounds;  // columns of W, and spans of this warp per tile
};

__device__ __forceinline__ LinearShare linear_share(const LinearParams& p, int rank, int size) {
  LinearShare s;
  const int tiles = ceil_div(p.outer, kLinearRows);
  const int columns = linear_columns(p.inner, size);
  s.first_tile = blockIdx.y;
  s.tile_stride = gridDim.y;
  s.num_tiles = ceil_div(tiles - s.first_tile, s.tile_stride);
  s.first_column = min(rank * columns, p.inner);
  s.end_column = min(s.first_column + columns, p.inner);
  const int warp = threadIdx.x / 32;
  s.rounds = max(1, ceil_div(columns / kLinearSpan - warp, kLinearWarps));
  return s;
}

// Where a warp is: its next span to load or to multiply.
struct LinearCursor {
  int tile, round;

  __device__ __forceinline__ void advance(const LinearShare& s) {
    if (++round == s.rounds) {
      round = 0;
      ++tile;
    }
  }
  __device__ __forceinline__ int column(const LinearShare& s) const {
    return s.first_column + (round * kLinearWarps + static_cast<int>(threadIdx.x) / 32) * kLinearSpan;
  }
};

// 16 rows by 128 columns of W: piece `step` of lane 4g + t holds columns 32 step + 8t .. + 7 of rows g and g + 8.
struct LinearSpan {
  uint4 low[kLinearSteps], high[kLinearSteps];
};

template <typename T>
__device__ __forceinline__ void load_span(const LinearParams& p, const LinearShare& s, const LinearCursor& at,
                                          LinearSpan& span) {
  if (at.tile >= s.num_tiles) return;
  const int lane = threadIdx.x % 32;
  const int row = (s.first_tile + at.tile * s.tile_stride) * kLinearRows + lane / 4;
  const int column = at.column(s);
  const T* weight = static_cast<const T*>(p.weight) + column + lane % 4 * 8;
  const T* low = weight + static_cast<int64_t>(min(row, p.outer - 1)) * p.inner;
  const T* high = weight + static_cast<int64_t>(min(row + 8, p.outer - 1)) * p.inner;
#pragma unroll
  for (int step = 0; step < kLinearSteps; ++step) {
    if (column + step * 32 >= s.end_column) break;
    span.low[step] = load_once(low + step * 32);
    span.high[step] = load_once(high + step * 32);
  }
}

// sums += W . x^T of one span; x[j] is this lane's place in the row of its j-th token.
template <typename T, int kTiles>
__device__ __forceinline__ void multiply_span(const LinearShare& s, const LinearCursor& at, const LinearSpan& span,
                                              const char* const (&x)[kTiles], float (&sums)[kTiles][4]) {
  const int column = at.column(s), offset = (column - s.first_column) * 2;
#pragma unroll
  for (int step = 0; step < kLinearSteps; ++step) {
    if (column + step * 32 >= s.end_column) break;
    const uint4 low = span.low[step], high = span.high[step];
    const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const uint4 values = *reinterpret_cast<const uint4*>(x[j] + offset + step * 64);
      mma<T>(sums[j], first, values.x, values.y);
      mma<T>(sums[j], second, values.z, values.w);
    }
  }
}

// Shared memory of a block: x, the warps' partial sums, then those of the cluster's blocks.
template <int kTiles>
struct LinearShared {
  static constexpr int MaxTokens = kTiles * 8;
  static constexpr int MaxCluster = kTiles == 1 ? 4 : 2;  // larger ones are slower than cuBLAS (measured)
  static_assert(MaxCluster <= kMaxCluster);
  static constexpr int PartialFloats = MaxTokens * kLinearPitch;
  static constexpr int PartialBytes = kLinearWarps * PartialFloats * 4;
};

// Bytes between the tokens of x in shared memory: half a turn of the banks beyond the columns.
__host__ __device__ constexpr int linear_x_pitch(int inner, int size) { return linear_columns(inner, size) * 2 + 64; }

// Merges the partial sums of a tile: the warps' through shared memory; the blocks' in that of the tile's owner, where
// they are pushed as they are made, and added when the cluster meets.
template <typename T, int kTiles>
struct LinearMerge {
  using Shared = LinearShared<kTiles>;
  const LinearParams& p;
  const LinearShare& s;
  float* partials;  // [warps][tokens][pitch]
  float* parts;     // [slots][size][num_rows * 16]
  int rank, size, slots;

  __device__ __forceinline__ void store(int index, int i, float value) const {
    const int row = (s.first_tile + index * s.tile_stride) * kLinearRows + i % kLinearRows;
    if (row < p.outer) {
      static_cast<T*>(p.y)[static_cast<int64_t>(i / kLinearRows) * p.outer + row] = from_float<T>(value);
    }
  }

  // Tiles [first, last) that are this block's; the others' parts of them have arrived.
  __device__ __forceinline__ void collect(int first, int last) const {
    const int outputs = p.num_rows * kLinearRows;
#pragma unroll 1
    for (int index = first + rank; index < last; index += size) {
#pragma unroll 1
      for (int i = threadIdx.x; i < outputs; i += kLinearThreads) {
        float sum = 0.0f;
#pragma unroll 1
        for (int r = 0; r < size; ++r) sum += parts[(index / size % slots * size + r) * outputs + i];
        store(index, i, sum);
      }
    }
  }

  __device__ __forceinline__ void finish(int index, const float (&sums)[kTiles][4]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, outputs = p.num_rows * kLinearRows;
    if (index > 0) __syncthreads();  // the last tile's sums have been read
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = j * 8 + lane % 4 * 2 + e % 2, row = lane / 4 + e / 2 * 8;
        partials[warp * Shared::PartialFloats + token * kLinearPitch + row] = sums[j][e];
      }
    }
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    if (size > 1 && index == 0) cluster_wait();  // the others' shared memory is there
#endif
#pragma unroll 1
    for (int i = threadIdx.x; i < outputs; i += kLinearThreads) {
      const float* part = partials + i / kLinearRows * kLinearPitch + i % kLinearRows;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kLinearWarps; ++w) sum += part[w * Shared::PartialFloats];
      if (size == 1) {
        store(index, i, sum);
        continue;
      }
#if __CUDA_ARCH__ >= 900
      float* target = parts + (index / size % slots * size + rank) * outputs + i;
      *cooperative_groups::this_cluster().map_shared_rank(target, index % size) = sum;
#endif
    }
#if __CUDA_ARCH__ >= 900
    const int window = slots * size, done = index + 1;
    if (size == 1 || (done % window != 0 && done != s.num_tiles)) return;
    cluster_arrive();
    cluster_wait();
    collect((done - 1) / window * window, done);
    if (done == s.num_tiles) return;
    cluster_arrive();  // the slots may be written again
    cluster_wait();
#endif
  }

#if __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ void cluster_arrive() { cooperative_groups::this_cluster().barrier_arrive(); }
  static __device__ __forceinline__ void cluster_wait() { cooperative_groups::this_cluster().barrier_wait(); }
#endif
};

// Starts the copies of this warp's columns of x, those of each round as a group: no other warp reads them.
template <typename T>
__device__ __forceinline__ void start_tokens(const LinearParams& p, const LinearShare& s, char* shared, int pitch) {
  constexpr int kPacks = kLinearSpan / 8;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (LinearCursor at = {0, 0}; at.tile == 0; at.advance(s)) {
    const int column = at.column(s) + lane % kPacks * 8;
#pragma unroll 4
    for (int i = lane / kPacks; i < p.num_rows && column < s.end_column; i += 32 / kPacks) {
      const int token = (i + blockIdx.y) % p.num_rows;  // not all blocks the same one at a time
      copy_async16(shared_address(shared + token * pitch) + (column - s.first_column) * 2,
                   static_cast<const T*>(p.x) + static_cast<int64_t>(token) * p.inner + column, 16);
    }
    copy_async_commit();
  }
}

// Waits until the columns of `round`, of `rounds`, are there.
__device__ __forceinline__ void await_tokens(int round, int rounds) {
  switch (rounds - 1 - round) {
    case 0:
      copy_async_wait<0>();
      break;
    case 1:
      copy_async_wait<1>();
      break;
    case 2:
      copy_async_wait<2>();
      break;
    default:
      copy_async_wait<3>();
  }
  __syncwarp();
}

// grid (blocks of a cluster, clusters); each cluster takes every gridDim.y-th tile of 16 rows of W.
template <typename T, int kTiles>
__global__ void __launch_bounds__(kLinearThreads, 1) linear_kernel(const LinearParams p, int slots) {
  using Shared = LinearShared<kTiles>;
  extern __shared__ __align__(16) char shared[];
  const int rank = blockIdx.x, size = gridDim.x, lane = threadIdx.x % 32;
  const LinearShare s = linear_share(p, rank, size);
  const int pitch = linear_x_pitch(p.inner, size);
#if __CUDA_ARCH__ >= 900
  if (size > 1) LinearMerge<T, kTiles>::cluster_arrive();  // awaited before the first push
#endif
  LinearCursor next = {0, 0}, at = {0, 0};
  LinearSpan spans[kLinearAhead];
#pragma unroll
  for (int i = 0; i < kLinearAhead; ++i) {
    load_span<T>(p, s, next, spans[i]);
    next.advance(s);
  }
  wait_for_previous();  // a launch whose weight is not prefetch_safe did not come up before it could pass here
  start_tokens<T>(p, s, shared, pitch);

  const char* x[kTiles];  // tokens past the last repeat it; what becomes of them is not kept
#pragma unroll
  for (int j = 0; j < kTiles; ++j) x[j] = shared + min(j * 8 + lane / 4, p.num_rows - 1) * pitch + lane % 4 * 16;
  float* partials = reinterpret_cast<float*>(shared + p.num_rows * pitch);
  const LinearMerge<T, kTiles> merge{p, s, partials, partials + Shared::PartialBytes / 4, rank, size, slots};
  float sums[kTiles][4] = {};
#pragma unroll 1
  while (at.tile < s.num_tiles) {
#pragma unroll
    for (int i = 0; i < kLinearAhead; ++i) {
      if (at.tile == s.num_tiles) break;
      if (at.tile == 0) await_tokens(at.round, s.rounds);
      multiply_span<T, kTiles>(s, at, spans[i], x, sums);
      load_span<T>(p, s, next, spans[i]);
      next.advance(s);
      if (at.round == s.rounds - 1) {
        merge.finish(at.tile, sums);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[j][e] = 0.0f;
        }
      }
      at.advance(s);
    }
  }
}

// A block's shared memory but for the parts of the cluster's blocks.
template <int kTiles>
int linear_bytes(int num_rows, int inner, int size) {
  return num_rows * linear_x_pitch(inner, size) + LinearShared<kTiles>::PartialBytes;
}

template <typename T, int kTiles>
cudaError_t run_linear(const LinearParams& p, const Chip& chip, cudaStream_t stream) {
  using Shared = LinearShared<kTiles>;
  const int largest = chip.major >= 9 ? Shared::MaxCluster : 1;
  int size = 1;  // chosen as for the most tokens, so that all are added alike
  while (size < largest && linear_bytes<kTiles>(Shared::MaxTokens, p.inner, size) > kLinearSharedBytes) size *= 2;
  const int bytes = linear_bytes<kTiles>(p.num_rows, p.inner, size);
  // Where linear_wide.cuh computes what does not fit, it computes any number of tokens of which the most would not.
  const int most = has_wgmma(chip) ? linear_bytes<kTiles>(Shared::MaxTokens, p.inner, size) : bytes;
  if (most > std::min(kLinearSharedBytes, chip.shared_bytes)) return cudaErrorNotSupported;
  const int slot = size > 1 ? size * p.num_rows * kLinearRows * 4 : 0;
  const int slots = slot == 0 ? 1 : std::min(kLinearMaxSlots, (chip.shared_bytes - bytes) / slot);
  if (slots == 0) return cudaErrorNotSupported;
  const auto kernel = linear_kernel<T, kTiles>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, chip.shared_bytes);
  if (error != cudaSuccess) return error;
  thread_local ClusterRoom known;
  int clusters = 0;
  error = cluster_room(kernel, chip, kLinearThreads, size, &known, &clusters);
  if (error != cudaSuccess) return error;
  clusters = std::min(clusters, ceil_div(p.outer, kLinearRows));
  const Overlap overlap = p.prefetch_safe != 0 ? Overlap::kYes : Overlap::kNo;
  return launch(overlap, kernel, dim3(size, clusters), kLinearThreads, bytes + slots * slot, size, stream, p, slots);
}

template <typename T>
cudaError_t launch_linear(const LinearParams& p, cudaStream_t stream) {
  if constexpr (sizeof(T) != 2) {
    return cudaErrorNotSupported;
  } else {
    Chip chip;
    if (const cudaError_t error = Chip::current(&chip); error != cudaSuccess) return error;
    if (p.num_rows > kMaxLinearRows || p.inner % 32 != 0) return cudaErrorNotSupported;
    if (p.num_rows <= 8) return run_linear<T, 1>(p, chip, stream);
    const cudaError_t error = p.num_rows <= 16 ? run_linear<T, 2>(p, chip, stream) : cudaErrorNotSupported;
    return error != cudaErrorNotSupported ? error : launch_linear_wide<T>(p, chip, stream);
  }
}

}  // namespace trt_eagle3
