// Linear with a quantised weight, for a few tokens, at what reading half or a quarter of its bytes costs. This file: up
// to 16 tokens whose part of x fits into shared memory; linear_packed_wide.cuh: the others, up to 64.
//
// Idea: what a lane loads are whole operands (packed_weight.cuh), some spans ahead, and numbers of T are made of them
// right before the product. A tile of 16 rows of W belongs to a group of 4 to 16 warps that share its columns; a
// block's groups go on by themselves, so that one's merging hides behind the others' loads. x lies in shared memory
// whole; where it is too wide, a cluster splits K, and its blocks' sums meet once, at the end. Bytes moved:
// N * K * bits / 8 and scales, x, y. Measured: docs/measurements.md, "Quantised weights".
//
// Who adds what, and in which order, follows from N, K and whether there are more than 8 tokens.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>

#include "chip.cuh"
#include "cluster_room.cuh"
#include "packed_weight.cuh"

namespace trt_eagle3 {

constexpr int kPackedWarps = 16;
constexpr int kPackedThreads = 32 * kPackedWarps;
constexpr int kPackedMaxCluster = 4;
static_assert(kPackedMaxCluster <= kMaxCluster);
constexpr int kPackedPitch = 20;                // floats between the tokens of a partial sum: no bank conflicts
constexpr int kPackedSharedBytes = 160 * 1024;  // of a block: loads on their way take what is left of the L1 cache

// A block's shared memory: x, the warps' partial sums, then those of the cluster's blocks.
template <int kTiles>
struct PackedShared {
  static constexpr int MaxTokens = kTiles * 8;
  static constexpr int Buffers = kTiles == 1 ? 2 : 1;  // of partial sums: with two, a tile need not wait for the last
  static constexpr int PartialFloats = MaxTokens * kPackedPitch;
  static constexpr int PartialBytes = Buffers * kPackedWarps * PartialFloats * 4;

  // Columns of W, in whole spans, of each block of a cluster.
  static __host__ __device__ constexpr int columns(int inner, int size) {
    return ceil_div(inner / kPackedSpan, size) * kPackedSpan;
  }
  // Bytes between the tokens of x: ldmatrix without bank conflicts.
  static __host__ __device__ constexpr int pitch(int inner, int size) { return columns(inner, size) * 2 + 16; }
  static constexpr int bytes(int num_rows, int inner, int size) { return num_rows * pitch(inner, size) + PartialBytes; }
};

// What a launch is cut into. Tile i of a cluster is tile blockIdx.y + i * gridDim.y of W; a group takes every
// groups-th of those, its warps every split-th span.
struct PackedShare {
  int rank, size, split, groups, group, part;
  int first_column, num_spans, num_tiles;

  template <typename Shared>
  static __device__ __forceinline__ PackedShare of(const PackedWeight& w, int split) {
    PackedShare s;
    const int warp = threadIdx.x / 32;
    s.rank = blockIdx.x;
    s.size = gridDim.x;
    s.split = split;
    s.groups = kPackedWarps / split;
    s.group = warp / split;
    s.part = warp % split;
    const int columns = Shared::columns(w.inner, s.size);
    s.first_column = min(s.rank * columns, w.inner);
    s.num_spans = (min(s.first_column + columns, w.inner) - s.first_column) / kPackedSpan;
    s.num_tiles = ceil_div(w.outer / kPackedRows - static_cast<int>(blockIdx.y), gridDim.y);
    return s;
  }
};

// Where a warp is: its next span to load or to multiply.
struct PackedCursor {
  int tile, span;

  __device__ __forceinline__ bool done(const PackedShare& s) const { return tile >= s.num_tiles; }
  // Whether the last one was the last of its tile.
  __device__ __forceinline__ bool advance(const PackedShare& s) {
    span += s.split;
    if (span < s.num_spans) return false;
    span = s.part;
    tile += s.groups;
    return true;
  }
};

// The spans of a warp, in its order.
template <typename Format>
struct PackedReader {
  PackedCursor at;
  PackedPlace<Format> place;

  __device__ __forceinline__ void set(const PackedWeight& w, const PackedShare& s) {
    const int tile = static_cast<int>(blockIdx.y) + at.tile * static_cast<int>(gridDim.y);
    place.set(w, tile * kPackedRows + threadIdx.x % 32 / 4, s.first_column + at.span * kPackedSpan);
  }
  __device__ __forceinline__ void load(const PackedWeight& w, const PackedShare& s, PackedSpan<Format>& span) {
    if (at.done(s)) return;
    if (at.span < s.num_spans) place.load(w, span);
    if (at.advance(s)) {
      if (!at.done(s)) set(w, s);
    } else {
      place.move(w, s.split * kPackedSpan);
    }
  }
};

// sums += W . x^T of one span; x[j] is where this lane reads of tokens 8j to 8j + 7.
template <typename Format, int kTiles>
__device__ __forceinline__ void multiply_packed_span(const PackedWeight& w, const PackedSpan<Format>& span,
                                                     uint32_t offset, const uint32_t (&x)[kTiles],
                                                     float (&sums)[kTiles][4]) {
  using T = typename Format::T;
  constexpr int kPerGroup = kPackedBlocks / Format::Groups;
#pragma unroll
  for (int group = 0; group < Format::Groups; ++group) {
    float even[kTiles][4] = {}, other[4] = {};  // two chains: a product need not wait for the last
#pragma unroll
    for (int block = group * kPerGroup; block < (group + 1) * kPerGroup; block += 2) {
      uint32_t first[4], second[4];
      Format::operand(span, block, first);
      Format::operand(span, block + 1, second);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        uint32_t values[4];
        load_matrix4(values, x[j] + offset + block * 32);
        mma<T>(even[j], first, values[0], values[1]);
        mma<T>(kTiles == 1 ? other : even[j], second, values[2], values[3]);
      }
    }
    const float low = Format::scale(w, span.low_scale, group), high = Format::scale(w, span.high_scale, group);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[j][e] += (even[j][e] + other[e]) * (e < 2 ? low : high);
    }
  }
}

__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// Merges the partial sums of a tile: the group's warps' through shared memory; the blocks' in that of the tile's owner,
// to which they are pushed as they are made.
template <typename T, int kTiles>
struct PackedMerge {
  using Shared = PackedShared<kTiles>;
  const LinearParams& p;
  const PackedShare& s;
  float* partials;  // [buffers][warps][tokens][pitch]
  float* parts;     // [tiles / size][size][num_rows * 16]

  __device__ __forceinline__ void store(int tile, int i, float value) const {
    const int row = (static_cast<int>(blockIdx.y) + tile * static_cast<int>(gridDim.y)) * kPackedRows + i % kPackedRows;
    static_cast<T*>(p.y)[static_cast<int64_t>(i / kPackedRows) * p.outer + row] = from_float<T>(value);
  }

  __device__ __forceinline__ void finish(int tile, int buffer, const float (&sums)[kTiles][4]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, outputs = p.num_rows * kPackedRows;
    const int threads = s.split * 32, thread = threadIdx.x % threads;
    float* buffered = partials + buffer * kPackedWarps * Shared::PartialFloats;
    if (Shared::Buffers == 1) named_barrier(1 + s.group, threads);  // the last tile's sums have been read
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = j * 8 + lane % 4 * 2 + e % 2, row = lane / 4 + e / 2 * 8;
        buffered[warp * Shared::PartialFloats + token * kPackedPitch + row] = sums[j][e];
      }
    }
    named_barrier(1 + s.group, threads);
    const float* first = buffered + s.group * s.split * Shared::PartialFloats;
#pragma unroll 1
    for (int i = thread; i < outputs; i += threads) {
      const float* part = first + i / kPackedRows * kPackedPitch + i % kPackedRows;
      float sum = part[0];
#pragma unroll 1
      for (int w = 1; w < s.split; w += 3) {  // 4 or 16 warps, or 8: three more at a time, and two
        sum += part[w * Shared::PartialFloats];
        if (w + 1 < s.split) sum += part[(w + 1) * Shared::PartialFloats];
        if (w + 2 < s.split) sum += part[(w + 2) * Shared::PartialFloats];
      }
      if (s.size == 1) {
        store(tile, i, sum);
        continue;
      }
#if __CUDA_ARCH__ >= 900
      float* target = parts + (tile / s.size * s.size + s.rank) * outputs + i;
      *cooperative_groups::this_cluster().map_shared_rank(target, tile % s.size) = sum;
#endif
    }
  }

  // After all of the cluster's tiles: adds the blocks' parts of those that are this block's.
  __device__ __forceinline__ void collect() const {
    const int outputs = p.num_rows * kPackedRows, own = ceil_div(s.num_tiles - s.rank, s.size);
#pragma unroll 1
    for (int i = threadIdx.x; i < own * outputs; i += kPackedThreads) {
      const int index = i / outputs, output = i - index * outputs;
      float sum = 0.0f;
#pragma unroll 1
      for (int r = 0; r < s.size; ++r) sum += parts[(index * s.size + r) * outputs + output];
      store(index * s.size + s.rank, output, sum);
    }
  }
};

// Copies this block's columns of x.
template <typename T>
__device__ __forceinline__ void load_packed_x(const LinearParams& p, const PackedShare& s, uint32_t shared, int pitch) {
  const int chunks = s.num_spans * (kPackedSpan / 8);
#pragma unroll 1
  for (int token = 0; token < p.num_rows; ++token) {
    const T* row = static_cast<const T*>(p.x) + static_cast<int64_t>(token) * p.inner + s.first_column;
#pragma unroll 2
    for (int i = threadIdx.x; i < chunks; i += kPackedThreads) {
      copy_async16(shared + token * pitch + i * 16, row + i * 8, 16);
    }
  }
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
}

// grid (blocks of a cluster, clusters).
template <typename Format, int kTiles>
__global__ void __launch_bounds__(kPackedThreads, 1)
    linear_packed_kernel(const LinearParams p, const PackedWeight w, int split) {
  using T = typename Format::T;
  using Shared = PackedShared<kTiles>;
  extern __shared__ __align__(16) char shared[];
  const int lane = threadIdx.x % 32;
  const PackedShare s = PackedShare::of<Shared>(w, split);
  const int pitch = Shared::pitch(w.inner, s.size);
#if __CUDA_ARCH__ >= 900
  if (s.size > 1) cooperative_groups::this_cluster().barrier_arrive();  // awaited before the first push
#endif
  PackedReader<Format> reader = {{s.group, s.part}, {}};
  PackedSpan<Format> spans[Format::Ahead];
  reader.set(w, s);
#pragma unroll
  for (int i = 0; i < Format::Ahead; ++i) reader.load(w, s, spans[i]);
  wait_for_previous();  // a launch whose weight is not prefetch_safe did not come up before it could pass here
  load_packed_x<T>(p, s, shared_address(shared), pitch);
#if __CUDA_ARCH__ >= 900
  if (s.size > 1) cooperative_groups::this_cluster().barrier_wait();
#endif

  uint32_t x[kTiles];  // tokens past the last repeat it; what becomes of them is not kept
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    x[j] = shared_address(shared) + min(j * 8 + lane % 8, p.num_rows - 1) * pitch + lane / 8 * 16;
  }
  float* partials = reinterpret_cast<float*>(shared + p.num_rows * pitch);
  const PackedMerge<T, kTiles> merge{p, s, partials, partials + Shared::PartialBytes / 4};
  float sums[kTiles][4] = {};
  PackedCursor at = {s.group, s.part};
  int buffer = 0;
#pragma unroll 1
  while (!at.done(s)) {
#pragma unroll
    for (int i = 0; i < Format::Ahead; ++i) {
      if (at.done(s)) break;
      if (at.span < s.num_spans) {
        multiply_packed_span<Format, kTiles>(w, spans[i], at.span * kPackedSpan * 2, x, sums);
      }
      reader.load(w, s, spans[i]);
      const int tile = at.tile;
      if (at.advance(s)) {
        merge.finish(tile, buffer, sums);
        buffer = Shared::Buffers - 1 - buffer;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[j][e] = 0.0f;
        }
      }
    }
  }
#if __CUDA_ARCH__ >= 900
  if (s.size > 1) {
    cooperative_groups::this_cluster().sync();
    merge.collect();
  }
#endif
}

template <typename Format, int kTiles>
cudaError_t run_linear_packed(const LinearParams& p, const PackedWeight& w, const Chip& chip, cudaStream_t stream) {
  using Shared = PackedShared<kTiles>;
  const int largest = chip.major >= 9 ? kPackedMaxCluster : 1;
  int size = 1;  // chosen as for the most tokens, so that all are added alike
  while (size < largest && Shared::bytes(Shared::MaxTokens, p.inner, size) > kPackedSharedBytes) size *= 2;
  const auto kernel = linear_packed_kernel<Format, kTiles>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, chip.shared_bytes);
  if (error != cudaSuccess) return error;
  thread_local ClusterRoom known;
  int clusters = 0;
  error = cluster_room(kernel, chip, kPackedThreads, size, &known, &clusters);
  if (error != cudaSuccess) return error;
  const int tiles = p.outer / kPackedRows, each = ceil_div(tiles, clusters);
  const int parts = size == 1 ? 0 : ceil_div(each, size) * size * kPackedRows * 4;  // of a token
  const int most = Shared::bytes(Shared::MaxTokens, p.inner, size) + Shared::MaxTokens * parts;
  if (most > std::min(kPackedSharedBytes + 32 * 1024, chip.shared_bytes)) return cudaErrorNotSupported;
  const int bytes = Shared::bytes(p.num_rows, p.inner, size) + p.num_rows * parts;
  const int split = each >= 3 ? 4 : each == 2 ? 8 : 16;  // so that all warps have something to do
  const Overlap overlap = p.prefetch_safe != 0 ? Overlap::kYes : Overlap::kNo;
  const dim3 grid(size, std::min(clusters, tiles));
  return launch(overlap, kernel, grid, kPackedThreads, bytes, size, stream, p, w, split);
}

}  // namespace trt_eagle3
