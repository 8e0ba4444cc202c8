// Linear with a quantised weight, for a few tokens, at what reading half or a quarter of its bytes costs. This file: up
// to 16 tokens whose part of x fits into shared memory; linear_packed_wide.cuh: the others, up to 64.
//
// Idea: what a lane copies into its warp's ring, some spans ahead, are whole operands (packed_weight.cuh), and numbers
// are made of them right before the product: of half, where x is bfloat16 too, because those cost the fewest
// instructions, and a multiprocessor has four for each byte that memory brings. A tile of 16 rows of W belongs to a
// group of 4 to 16 warps that share its columns; a block's groups go on by themselves, so that one's merging hides
// behind the others' loads. x lies in shared memory whole; where it is too wide, a cluster splits K, and its blocks'
// sums meet once, at the end. Bytes moved: N * K * bits / 8 and scales, x, y. Measured: docs/measurements.md,
// "Quantised weights".
//
// Who adds what, and in which order, follows from N, K and whether there are more than 8 tokens.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>

#include "barrier.cuh"
#include "chip.cuh"
#include "cluster_room.cuh"
#include "packed_weight.cuh"
#include "x_in_half.cuh"

namespace trt_eagle3 {

constexpr int kPackedMaxCluster = 8;
static_assert(kPackedMaxCluster <= kMaxCluster);
constexpr int kPackedPitch = 20;  // floats between the tokens of a partial sum: no bank conflicts

// How a block is made. Large, for Hopper's shared memory: a block has a multiprocessor to itself, and most of its
// memory is for what is on its way, so that reading goes on while one launch ends and the next one waits for its x.
// (Blocks of two launches on a multiprocessor were slower: the later launch's lie where the earlier one's end first.)
template <typename Format, int kMaxTiles, bool kIsLarge>
struct PackedBlock {
  using Weight = Format;
  static constexpr int Tiles = kMaxTiles;  // of 8 tokens
  static constexpr bool Large = kIsLarge;
  static constexpr int Warps = Large ? 16 : 8;
  static constexpr int Threads = Warps * 32;
  static constexpr int MaxTokens = Tiles * 8;
  static constexpr int Buffers = Tiles == 1 ? 2 : 1;  // of partial sums: with two, a tile need not wait for the last
  static constexpr int SlotBytes = kPackedSlotBytes<Format>;
  static constexpr int Slots = (Large ? 144 : 40) * 1024 / (Warps * SlotBytes);  // spans of a warp
  static constexpr int RingBytes = Warps * Slots * SlotBytes;
  static_assert(Slots >= 2 && SlotBytes % 16 == 0);

  // Columns of W, in whole spans, of each block of a cluster.
  static __host__ __device__ constexpr int columns(int inner, int size) {
    return ceil_div(inner / kPackedSpan, size) * kPackedSpan;
  }
  // Bytes between the tokens of x: ldmatrix without bank conflicts.
  static __host__ __device__ constexpr int pitch(int inner, int size) { return columns(inner, size) * 2 + 16; }
  // Floats of the partial sums of a warp.
  static __host__ __device__ constexpr int partial(int num_rows) { return num_rows * kPackedPitch; }
  // What XNotes wants.
  static __host__ __device__ constexpr int note_bytes(int inner, int size) {
    const int spans = columns(inner, size) / kPackedSpan;
    return (Format::InHalf ? spans * MaxTokens * 4 : 0) + (Format::Based ? spans * Format::Groups * MaxTokens * 8 : 0);
  }
  // Of shared memory: the warps' rings, notes of x, x, the warps' partial sums, then those of the cluster's blocks.
  static constexpr int bytes(int num_rows, int inner, int size) {
    return RingBytes + note_bytes(inner, size) + num_rows * pitch(inner, size) +
           Buffers * Warps * partial(num_rows) * 4;
  }
};

// What a launch is cut into. Tile i of a cluster is tile blockIdx.y + i * gridDim.y of W; a group takes every
// groups-th of those, its warps every split-th span.
struct PackedShare {
  int rank, size, split, groups, group, part;
  int first_column, num_spans, num_tiles, rounds;  // spans of this warp in a tile

  template <typename Block>
  static __device__ __forceinline__ PackedShare of(const PackedWeight& w, int split) {
    PackedShare s;
    const int warp = threadIdx.x / 32;
    s.rank = blockIdx.x;
    s.size = gridDim.x;
    s.split = split;
    s.groups = Block::Warps / split;
    s.group = warp / split;
    s.part = warp % split;
    const int columns = Block::columns(w.inner, s.size);
    s.first_column = min(s.rank * columns, w.inner);
    s.num_spans = (min(s.first_column + columns, w.inner) - s.first_column) / kPackedSpan;
    s.num_tiles = ceil_div(w.outer / kPackedRows - static_cast<int>(blockIdx.y), gridDim.y);
    s.rounds = max(0, ceil_div(s.num_spans - s.part, split));
    return s;
  }
};

// The spans of a warp, in its order, on their way into its ring.
template <typename Block>
struct PackedReader {
  PackedPlace<typename Block::Weight> place;
  uint32_t slot, end;
  int tile, left;

  __device__ __forceinline__ void start(const PackedWeight& w, const PackedShare& s, uint32_t ring) {
    slot = ring;
    end = ring + Block::Slots * Block::SlotBytes;
    tile = s.rounds > 0 ? s.group : s.num_tiles;
    left = 0;
    set(w, s);
  }
  __device__ __forceinline__ void set(const PackedWeight& w, const PackedShare& s) {
    const int row = (static_cast<int>(blockIdx.y) + tile * static_cast<int>(gridDim.y)) * kPackedRows;
    place.set(w, row + threadIdx.x % 32 / 4, s.first_column + s.part * kPackedSpan);
    left = s.rounds;
  }
  __device__ __forceinline__ void copy_next(const PackedWeight& w, const PackedShare& s) {
    if (tile < s.num_tiles) {
      place.copy(w, slot);
      place.move(w, s.split * kPackedSpan);
      slot += Block::SlotBytes;
      if (slot == end) slot -= Block::Slots * Block::SlotBytes;
      if (--left == 0) {
        tile += s.groups;
        set(w, s);
      }
    }
    copy_async_commit();
  }
};

// sums += W . x^T of one span; x[j] is where this lane reads of tokens 8j to 8j + 7. factors, x_sums: of tokens 2t and
// 2t + 1 from this span on.
template <typename Format, int kTiles>
__device__ __forceinline__ void multiply_packed_span(const PackedWeight& w, const PackedSpan<Format>& span,
                                                     uint32_t offset, const uint32_t (&x)[kTiles],
                                                     const float2* factors, const float4* x_sums,
                                                     float (&sums)[kTiles][4]) {
  using T = std::conditional_t<Format::InHalf, __half, typename Format::T>;
  constexpr int kPerGroup = kPackedBlocks / Format::Groups;
#pragma unroll
  for (int group = 0; group < Format::Groups; ++group) {
    float even[kTiles][4] = {}, other[4] = {};  // two chains: a product need not wait for the last
    if constexpr (Format::Based) {
      const float low = Format::zero_of(span.low_scale, group), high = Format::zero_of(span.high_scale, group);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const float4 x_sum = x_sums[(group * kTiles + j) * 4];
        even[j][0] = -x_sum.x - low * x_sum.y;
        even[j][1] = -x_sum.z - low * x_sum.w;
        even[j][2] = -x_sum.x - high * x_sum.y;
        even[j][3] = -x_sum.z - high * x_sum.w;
      }
    }
#pragma unroll
    for (int block = group * kPerGroup; block < (group + 1) * kPerGroup; block += 2) {
      uint32_t first[4], second[4];
      Format::quick_operand(span, block, first);
      Format::quick_operand(span, block + 1, second);
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
      float2 factor = make_float2(1.0f, 1.0f);
      if constexpr (Format::InHalf) factor = factors[j * 4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float sum = kTiles == 1 ? even[j][e] + other[e] : even[j][e];
        sums[j][e] += sum * ((e < 2 ? low : high) * (e % 2 == 0 ? factor.x : factor.y));
      }
    }
  }
}

// Merges the partial sums of a tile: the group's warps' through shared memory; the blocks' in that of the tile's owner,
// to which they are pushed as they are made.
template <typename Block>
struct PackedMerge {
  using T = typename Block::Weight::T;
  const LinearParams& p;
  const PackedShare& s;
  float* partials;  // [buffers][warps][tokens][pitch]
  float* parts;     // [tiles / size][size][num_rows * 16]

  __device__ __forceinline__ void store(int tile, int i, float value) const {
    const int row = (static_cast<int>(blockIdx.y) + tile * static_cast<int>(gridDim.y)) * kPackedRows + i % kPackedRows;
    static_cast<T*>(p.y)[static_cast<int64_t>(i / kPackedRows) * p.outer + row] = from_float<T>(value);
  }

  __device__ __forceinline__ void finish(int tile, int buffer, const float (&sums)[Block::Tiles][4]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, outputs = p.num_rows * kPackedRows;
    const int threads = s.split * 32, thread = threadIdx.x % threads;
    const int floats = Block::partial(p.num_rows);
    float* buffered = partials + buffer * Block::Warps * floats;
    if (Block::Buffers == 1) named_barrier(1 + s.group, threads);  // the last tile's sums have been read
#pragma unroll
    for (int j = 0; j < Block::Tiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = j * 8 + lane % 4 * 2 + e % 2, row = lane / 4 + e / 2 * 8;
        if (token < p.num_rows) buffered[warp * floats + token * kPackedPitch + row] = sums[j][e];
      }
    }
    named_barrier(1 + s.group, threads);
    const float* first = buffered + s.group * s.split * floats;
#pragma unroll 1
    for (int i = thread; i < outputs; i += threads) {
      const float* part = first + i / kPackedRows * kPackedPitch + i % kPackedRows;
      float sum = part[0];
#pragma unroll 1
      for (int w = 1; w < s.split; w += 3) {  // 4 or 16 warps, or 8: three more at a time, and two
        sum += part[w * floats];
        if (w + 1 < s.split) sum += part[(w + 1) * floats];
        if (w + 2 < s.split) sum += part[(w + 2) * floats];
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
    for (int i = threadIdx.x; i < own * outputs; i += Block::Threads) {
      const int index = i / outputs, output = i - index * outputs;
      float sum = 0.0f;
#pragma unroll 1
      for (int r = 0; r < s.size; ++r) sum += parts[(index * s.size + r) * outputs + output];
      store(index * s.size + s.rank, output, sum);
    }
  }
};

// Brings this block's columns of x, eight tokens' at a time. Not by asynchronous copies: who waits for those waits for
// all of the weight that is on its way.
template <typename Block>
__device__ __forceinline__ void load_packed_x(const LinearParams& p, const PackedShare& s, char* tokens, int pitch,
                                              const XNotes& notes) {
  using Format = typename Block::Weight;
  using T = typename Format::T;
  const int chunks = s.num_spans * (kPackedSpan / 8);
#pragma unroll 1
  for (int i = threadIdx.x; i < chunks; i += Block::Threads) {
#pragma unroll 1
    for (int first = 0; first < p.num_rows; first += 8) {
      const T* column = static_cast<const T*>(p.x) + static_cast<int64_t>(first) * p.inner + s.first_column + i * 8;
      uint4 values[8];
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        if (first + t < p.num_rows)
          values[t] = *reinterpret_cast<const uint4*>(column + t * static_cast<int64_t>(p.inner));
      }
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        if (first + t >= p.num_rows) break;
        char* place = tokens + (first + t) * pitch + i * 16;
        if constexpr (Format::InHalf) {
          const XNotes own = {notes.factors + first + t, notes.sums + first + t};
          keep_in_half<Format, Block::MaxTokens>(values[t], place, own, i);
        } else {
          *reinterpret_cast<uint4*>(place) = values[t];
        }
      }
    }
  }
  __syncthreads();
}

template <typename Block>
__device__ __forceinline__ void linear_packed(const LinearParams& p, const PackedWeight& w, int split) {
  using Format = typename Block::Weight;
  constexpr int kTiles = Block::Tiles;
  extern __shared__ __align__(16) char shared[];
  const int lane = threadIdx.x % 32;
  const PackedShare s = PackedShare::of<Block>(w, split);
  const int pitch = Block::pitch(w.inner, s.size);
#if __CUDA_ARCH__ >= 900
  if (s.size > 1) cooperative_groups::this_cluster().barrier_arrive();  // awaited before the first push
#endif
  const char* ring = shared + threadIdx.x / 32 * (Block::Slots * Block::SlotBytes);
  PackedReader<Block> reader;
  reader.start(w, s, shared_address(ring));
#pragma unroll 1
  for (int i = 0; i < Block::Slots - 1; ++i) reader.copy_next(w, s);
  wait_for_previous();  // a launch whose weight is not prefetch_safe did not come up before it could pass here
  char* tokens = shared + Block::RingBytes + Block::note_bytes(w.inner, s.size);
  float2* x_sums = reinterpret_cast<float2*>(shared + Block::RingBytes);
  const int groups = Format::Based ? Block::columns(w.inner, s.size) / kPackedSpan * Format::Groups : 0;
  float* factors = reinterpret_cast<float*>(x_sums + groups * Block::MaxTokens);
  load_packed_x<Block>(p, s, tokens, pitch, {factors, x_sums});
#if __CUDA_ARCH__ >= 900
  if (s.size > 1) cooperative_groups::this_cluster().barrier_wait();
#endif

  uint32_t x[kTiles];  // tokens past the last repeat it; what becomes of them is not kept
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    x[j] = shared_address(tokens) + min(j * 8 + lane % 8, p.num_rows - 1) * pitch + lane / 8 * 16;
  }
  float* partials = reinterpret_cast<float*>(tokens + p.num_rows * pitch);
  const int partial_floats = Block::Buffers * Block::Warps * Block::partial(p.num_rows);
  const PackedMerge<Block> merge{p, s, partials, partials + partial_floats};
  const float4* lane_sums = reinterpret_cast<const float4*>(x_sums) + lane % 4;
  const float2* lane_factors = reinterpret_cast<const float2*>(factors) + lane % 4;
  const uint32_t scale_base = scale_index<Format>(w, s.first_column);
  int buffer = 0, slot = 0;
#pragma unroll 1
  for (int tile = s.group; tile < s.num_tiles; tile += s.groups) {
    float sums[kTiles][4] = {};
#pragma unroll 1
    for (int span = s.part; span < s.num_spans; span += s.split) {
      copy_async_wait<Block::Slots - 2>();
      __syncwarp();  // the others' copies too; and all have read the slot before, which the next copies fill
      PackedSpan<Format> values;
      read_span<Format>(w, ring + slot, scale_base + span * Format::Groups, values);
      reader.copy_next(w, s);
      multiply_packed_span<Format, kTiles>(w, values, span * kPackedSpan * 2, x, lane_factors + span * kTiles * 4,
                                           lane_sums + span * Format::Groups * kTiles * 4, sums);
      slot += Block::SlotBytes;
      if (slot == Block::Slots * Block::SlotBytes) slot = 0;
    }
    merge.finish(tile, buffer, sums);
    buffer = Block::Buffers - 1 - buffer;
  }
#if __CUDA_ARCH__ >= 900
  if (s.size > 1) {
    cooperative_groups::this_cluster().sync();
    merge.collect();
  }
#endif
}

// grid (blocks of a cluster, clusters).
template <typename Block>
__global__ void __launch_bounds__(Block::Threads, 1)
    linear_packed_kernel(const LinearParams p, const PackedWeight w, int split) {
#if __CUDA_ARCH__ >= 900
  linear_packed<Block>(p, w, split);
#else
  if constexpr (!Block::Large) linear_packed<Block>(p, w, split);
#endif
}

// Spans of a tile are divided among so many warps that all have something to do.
inline int packed_split(int tiles_each, int warps) { return tiles_each >= 4 ? 4 : tiles_each >= 2 ? 8 : warps; }

constexpr int kPackedLargeBytes = 200 * 1024;  // of shared memory, that Hopper has and others have not

template <typename Block>
cudaError_t run_linear_packed(const LinearParams& p, const PackedWeight& w, const Chip& chip, cudaStream_t stream) {
  const auto kernel = linear_packed_kernel<Block>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, chip.shared_bytes);
  if (error != cudaSuccess) return error;
  thread_local ClusterRoom known;
  const int tiles = p.outer / kPackedRows;
  for (int size = 1; size <= (Block::Large ? kPackedMaxCluster : 1); size *= 2) {
    int clusters = 0;
    error = cluster_room(kernel, chip, Block::Threads, size, &known, &clusters);
    if (error != cudaSuccess) return error;
    const int each = ceil_div(tiles, clusters);
    const int parts = size == 1 ? 0 : ceil_div(each, size) * size * kPackedRows * 4;  // of a token
    // The cluster is chosen as for the most tokens, so that all are added alike.
    const int most = Block::bytes(Block::MaxTokens, p.inner, size) + Block::MaxTokens * parts;
    if (Block::Large && most > chip.shared_bytes) continue;
    const int bytes = Block::bytes(p.num_rows, p.inner, size) + p.num_rows * parts;
    if (bytes > chip.shared_bytes) return cudaErrorNotSupported;
    const Overlap overlap = p.prefetch_safe != 0 ? Overlap::kYes : Overlap::kNo;
    return launch(overlap, kernel, dim3(size, std::min(clusters, tiles)), Block::Threads, bytes, size, stream, p, w,
                  packed_split(each, Block::Warps));
  }
  return cudaErrorNotSupported;
}

// So many tokens at a time as fit: a token's sums do not depend on that.
template <typename Block>
cudaError_t run_linear_packed_in_passes(const LinearParams& p, const PackedWeight& w, const Chip& chip,
                                        cudaStream_t stream) {
  int most = Block::MaxTokens;
  while (most > 0 && Block::bytes(most, p.inner, 1) > chip.shared_bytes) most /= 2;
  if (most == 0) return cudaErrorNotSupported;
  for (int first = 0; first < p.num_rows; first += most) {
    LinearParams part = p;
    part.num_rows = std::min(most, p.num_rows - first);
    part.x = static_cast<const char*>(p.x) + int64_t{2} * first * p.inner;
    part.y = static_cast<char*>(p.y) + int64_t{2} * first * p.outer;
    if (const cudaError_t error = run_linear_packed<Block>(part, w, chip, stream); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace trt_eagle3
