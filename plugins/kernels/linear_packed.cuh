// Linear with a quantised weight, for a few tokens, at what reading half or a quarter of its bytes costs. This file: up
// to 16 tokens whose part of x fits into shared memory; linear_packed_wide.cuh: the others, up to 64.
//
// Idea: what a lane copies into its warp's ring, some spans ahead, are whole operands (packed_weight.cuh), and numbers
// are made of them right before the product: of half, where x is bfloat16 too, because those cost the fewest
// instructions, and a multiprocessor has four for each byte that memory brings. A tile of 16 rows of W, or of 32 where
// those are no more bytes, belongs to a group of 4 to 16 warps that share its columns; a block's groups go on by
// themselves, so that one's merging hides behind the others' loads. x lies in shared memory whole; where it is too
// wide, a cluster splits K, and its blocks' sums meet once, at the end. Bytes moved: N * K * bits / 8 and scales, x, y.
// Measured: docs/measurements.md, "Quantised weights".
//
// Who adds what, and in which order, follows from N, K and whether there are more than 8 tokens.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>

#include "barrier.cuh"
#include "chip.cuh"
#include "cluster_room.cuh"
#include "packed_block.cuh"
#include "x_in_half.cuh"

namespace trt_eagle3 {

// What zero points take of the products of a group of columns. x_sums: of tokens 2t and 2t + 1.
template <typename Block>
__device__ __forceinline__ void start_packed_sums(const PackedSpan<typename Block::Weight>& span, int group,
                                                  const float2* x_sums, float (&sums)[Block::Tiles][4]) {
  using Format = typename Block::Weight;
  const float low = Format::zero_of(span.low_scale, group), high = Format::zero_of(span.high_scale, group);
#pragma unroll
  for (int j = 0; j < Block::Tiles; ++j) {
    const float2 x_sum = x_sums[j * 4];
    sums[j][0] = -low * x_sum.x;
    sums[j][1] = -low * x_sum.y;
    sums[j][2] = -high * x_sum.x;
    sums[j][3] = -high * x_sum.y;
  }
}

// sums += W . x^T of one span of a tile's rows; x[j] is where this lane reads of tokens 8j to 8j + 7. factors, x_sums:
// of tokens 2t and 2t + 1 from this span on.
template <typename Block>
__device__ __forceinline__ void multiply_packed_span(const PackedWeight& w,
                                                     const PackedSpan<typename Block::Weight> (&spans)[Block::RowTiles],
                                                     uint32_t offset, const uint32_t (&x)[Block::Tiles],
                                                     const float2* factors, const float2* x_sums,
                                                     float (&sums)[Block::RowTiles][Block::Tiles][4]) {
  using Format = typename Block::Weight;
  using T = std::conditional_t<Format::InHalf, __half, typename Format::T>;
  constexpr int kTiles = Block::Tiles, kRowTiles = Block::RowTiles, kPerGroup = kPackedBlocks / Format::Groups;
  constexpr bool kTwoChains = kTiles * kRowTiles == 1;  // then a product need not wait for the last
#pragma unroll
  for (int group = 0; group < Format::Groups; ++group) {
    float even[kRowTiles][kTiles][4] = {}, other[4] = {};
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      if constexpr (Format::Based) start_packed_sums<Block>(spans[r], group, x_sums + group * kTiles * 4, even[r]);
    }
#pragma unroll
    for (int block = group * kPerGroup; block < (group + 1) * kPerGroup; block += 2) {
      uint32_t values[kTiles][4];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) load_matrix4(values[j], x[j] + offset + block * 32);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        uint32_t first[4], second[4];
        Format::quick_operand(spans[r], block, first);
        Format::quick_operand(spans[r], block + 1, second);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          mma<T>(even[r][j], first, values[j][0], values[j][1]);
          mma<T>(kTwoChains ? other : even[r][j], second, values[j][2], values[j][3]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      float2 factor = make_float2(1.0f, 1.0f);
      if constexpr (Format::InHalf) factor = factors[j * 4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        const float low = Format::scale(w, spans[r].low_scale, group);
        const float high = Format::scale(w, spans[r].high_scale, group);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float sum = kTwoChains ? even[r][j][e] + other[e] : even[r][j][e];
          sums[r][j][e] += sum * ((e < 2 ? low : high) * (e % 2 == 0 ? factor.x : factor.y));
        }
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
  float* parts;     // [tiles / size][size][num_rows * Block::Rows]

  __device__ __forceinline__ void store(int tile, int i, float value) const {
    const int first = (static_cast<int>(blockIdx.y) + tile * static_cast<int>(gridDim.y)) * Block::Rows;
    const int row = first + i % Block::Rows;
    if (Block::RowTiles > 1 && row >= p.outer) return;
    static_cast<T*>(p.y)[static_cast<int64_t>(i / Block::Rows) * p.outer + row] = from_float<T>(value);
  }

  __device__ __forceinline__ void finish(int tile, int buffer,
                                         const float (&sums)[Block::RowTiles][Block::Tiles][4]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, outputs = p.num_rows * Block::Rows;
    const int threads = s.split * 32, thread = threadIdx.x % threads;
    const int floats = Block::partial(p.num_rows);
    float* buffered = partials + buffer * Block::Warps * floats;
    if (Block::Buffers == 1) named_barrier(1 + s.group, threads);  // the last tile's sums have been read
#pragma unroll
    for (int j = 0; j < Block::Tiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = j * 8 + lane % 4 * 2 + e % 2, row = lane / 4 + e / 2 * 8;
        if (token >= p.num_rows) continue;
#pragma unroll
        for (int r = 0; r < Block::RowTiles; ++r) {
          buffered[warp * floats + token * Block::Pitch + r * kPackedRows + row] = sums[r][j][e];
        }
      }
    }
    named_barrier(1 + s.group, threads);
    const float* first = buffered + s.group * s.split * floats;
#pragma unroll 1
    for (int i = thread; i < outputs; i += threads) {
      const float* part = first + i / Block::Rows * Block::Pitch + i % Block::Rows;
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
      const int owner = tile & (s.size - 1);  // a cluster's size is a power of two
      float* target = parts + (tile - owner + s.rank) * outputs + i;
      *cooperative_groups::this_cluster().map_shared_rank(target, owner) = sum;
#endif
    }
  }

  // After all of the cluster's tiles: adds the blocks' parts of those that are this block's.
  __device__ __forceinline__ void collect() const {
    const int outputs = p.num_rows * Block::Rows, own = ceil_div(s.num_tiles - s.rank, s.size);
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

// Keeps the first kCount of some chunks of x that a lane has, of tokens `rows` and places `at` in them.
template <typename Block, int kCount, int kHave>
__device__ __forceinline__ void keep_packed_x(const uint4 (&x)[kHave], const int (&rows)[kHave], const int (&at)[kHave],
                                              int num_rows, char* tokens, int pitch, const XNotes& notes) {
  using Format = typename Block::Weight;
  uint4 values[kCount];
  int chunks[kCount];
  float factors[kCount], sums[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    values[k] = x[k];
    chunks[k] = at[k];
  }
  if constexpr (Format::InHalf) halve_chunks<Format>(values, chunks, factors, sums);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (rows[k] >= num_rows) continue;
    char* place = tokens + rows[k] * pitch + chunks[k] * 16;
    if constexpr (Format::InHalf) {
      const XNotes of_token = {notes.factors + rows[k], notes.sums + rows[k]};
      keep_halves<Format, Block::MaxTokens>(values[k], factors[k], sums[k], place, of_token, chunks[k]);
    } else {
      *reinterpret_cast<uint4*>(place) = values[k];
    }
  }
}

// Brings this block's columns of x, a chunk of 8 columns of a token a lane. Not by asynchronous copies: who waits for
// those waits for all of the weight that is on its way.
template <typename Block>
__device__ __forceinline__ void load_packed_x(const LinearParams& p, const PackedShare& s, char* tokens, int pitch,
                                              const XNotes& notes) {
  constexpr int kParts = Block::Tiles, kAtOnce = 4;
  const int chunks = max(s.num_spans, 1) * kChunksOfSpan, total = s.num_spans * kChunksOfSpan * p.num_rows;
  const int token_step = Block::Threads / chunks, chunk_step = Block::Threads % chunks;
  int token = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
#pragma unroll 1
  for (int first = 0; first < total; first += kParts * kAtOnce * Block::Threads) {
    uint4 values[kParts][kAtOnce];
    int own[kParts][kAtOnce], at[kParts][kAtOnce];
#pragma unroll
    for (int i = 0; i < kParts * kAtOnce; ++i) {
      uint4& value = values[i / kAtOnce][i % kAtOnce];
      own[i / kAtOnce][i % kAtOnce] = token;
      at[i / kAtOnce][i % kAtOnce] = chunk;
      value = {};
      if (token < p.num_rows) {
        const int64_t place = static_cast<int64_t>(token) * p.inner + s.first_column + chunk * 8;
        value = *reinterpret_cast<const uint4*>(static_cast<const char*>(p.x) + place * 2);
      }
      token += token_step;
      chunk += chunk_step;
      if (chunk >= chunks) {
        chunk -= chunks;
        ++token;
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int left = total - first - part * kAtOnce * Block::Threads;  // the same in all lanes
      if (left > Block::Threads) {
        keep_packed_x<Block, kAtOnce>(values[part], own[part], at[part], p.num_rows, tokens, pitch, notes);
      } else if (left > 0) {
        keep_packed_x<Block, 1>(values[part], own[part], at[part], p.num_rows, tokens, pitch, notes);
      }
    }
  }
  __syncthreads();
}

// The loop of a warp over its tiles. tokens: where x lies in shared memory.
template <typename Block>
__device__ __forceinline__ void multiply_packed_tiles(const PackedWeight& w, const PackedShare& s,
                                                      PackedReader<Block>& reader, const char* ring, uint32_t tokens,
                                                      int pitch, const float* factors, const float* x_sums,
                                                      const PackedMerge<Block>& merge) {
  using Format = typename Block::Weight;
  constexpr int kTiles = Block::Tiles;
  const int lane = threadIdx.x % 32;
  uint32_t x[kTiles];  // tokens past the last repeat it; what becomes of them is not kept
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    x[j] = tokens + min(j * 8 + lane % 8, merge.p.num_rows - 1) * pitch + lane / 8 * 16;
  }
  const float2* lane_sums = reinterpret_cast<const float2*>(x_sums) + lane % 4;
  const float2* lane_factors = reinterpret_cast<const float2*>(factors) + lane % 4;
  // Of the warp's first span: the others' differ by multiples of four spans, which do not count.
  const uint32_t scale_base = scale_index<Format>(w, s.first_column + s.part * kPackedSpan);
  int buffer = 0;
  uint32_t slot = 0, last = (Block::Slots - 1) * Block::SlotBytes;
#pragma unroll 1
  for (int tile = s.group; tile < s.num_tiles; tile += s.groups) {
    float sums[Block::RowTiles][kTiles][4] = {};
#pragma unroll 1
    for (int span = s.part; span < s.num_spans; span += s.split) {
      copy_async_wait<Block::Slots - 2>();
      __syncwarp();  // the others' copies too; and all have read the slot before, which the next copies fill
      PackedSpan<Format> values[Block::RowTiles];
#pragma unroll
      for (int r = 0; r < Block::RowTiles; ++r) {
        read_span<Format>(w, ring + slot + r * Block::SpanBytes, scale_base, values[r]);
      }
      reader.copy_next(w, s, shared_address(ring) + last);
      multiply_packed_span<Block>(w, values, span * kPackedSpan * 2, x, lane_factors + span * kTiles * 4,
                                  lane_sums + span * Format::Groups * kTiles * 4, sums);
      last = slot;
      slot = slot == (Block::Slots - 1) * Block::SlotBytes ? 0 : slot + Block::SlotBytes;
    }
    merge.finish(tile, buffer, sums);
    buffer = Block::Buffers - 1 - buffer;
  }
}

// Calls f with w, of which the compiler knows whether it has zero points, and the type of INT4's scales: the loop over
// spans need not ask.
template <typename Format, typename F>
__device__ __forceinline__ void with_known_weight(const PackedWeight& w, const F& f) {
  PackedWeight known = w;
  if constexpr (Format::InHalf && Format::Bits == 4 && Format::Based) {
    if (w.scale_bfloat16 != 0) {
      known.scale_bfloat16 = 1;
      if (w.zero == nullptr) {
        known.zero = nullptr;
        return f(known);
      }
      __builtin_assume(known.zero != nullptr);
      return f(known);
    }
    known.scale_bfloat16 = 0;
  }
  f(known);
}

template <typename Block>
__device__ __forceinline__ void linear_packed(const LinearParams& p, const PackedWeight& w, int split) {
  using Format = typename Block::Weight;
  extern __shared__ __align__(16) char shared[];
  const PackedShare s = PackedShare::of<Block>(w, split);
  const int pitch = Block::pitch(w.inner, s.size);
#if __CUDA_ARCH__ >= 900
  if (s.size > 1) cooperative_groups::this_cluster().barrier_arrive();  // awaited before the first push
#endif
  const char* ring = shared + threadIdx.x / 32 * (Block::Slots * Block::SlotBytes);
  PackedReader<Block> reader;
  reader.start(w, s);
#pragma unroll 1
  for (int i = 0; i < Block::Slots - 1; ++i) reader.copy_next(w, s, shared_address(ring) + i * Block::SlotBytes);
  wait_for_previous();  // a launch whose weight is not prefetch_safe did not come up before it could pass here
  char* tokens = shared + Block::RingBytes + Block::note_bytes(w.inner, s.size);
  float* x_sums = reinterpret_cast<float*>(shared + Block::RingBytes);
  const int groups = Format::Based ? Block::columns(w.inner, s.size) / kPackedSpan * Format::Groups : 0;
  float* factors = x_sums + groups * Block::MaxTokens;
  load_packed_x<Block>(p, s, tokens, pitch, {factors, x_sums});
#if __CUDA_ARCH__ >= 900
  if (s.size > 1) cooperative_groups::this_cluster().barrier_wait();
#endif
  float* partials = reinterpret_cast<float*>(tokens + p.num_rows * pitch);
  const int partial_floats = Block::Buffers * Block::Warps * Block::partial(p.num_rows);
  const PackedMerge<Block> merge{p, s, partials, partials + partial_floats};
  with_known_weight<Format>(w, [&](const PackedWeight& known) {
    multiply_packed_tiles<Block>(known, s, reader, ring, shared_address(tokens), pitch, factors, x_sums, merge);
  });
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
  const int tiles = ceil_div(p.outer, Block::Rows);
  for (int size = 1; size <= (Block::Large ? kPackedMaxCluster : 1); size *= 2) {
    int clusters = 0;
    error = cluster_room(kernel, chip, Block::Threads, size, &known, &clusters);
    if (error != cudaSuccess) return error;
    const int each = ceil_div(tiles, clusters);
    const int parts = size == 1 ? 0 : ceil_div(each, size) * size * Block::Rows * 4;  // of a token
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
