// Linear of up to 64 tokens: still bound by reading W, so rows of W are the rows of Hopper's products and 64 tokens
// their columns, whoever of them is there.
//
// Idea: a ring of stages of 128 columns, so that memory is asked for 256 bytes a row at a time, filled by asynchronous
// copies: W's first stages, which need no x, are on their way before the launch before has finished. Few rows of W are
// split along K over a cluster of two, whose sums meet in shared memory. Bytes moved: N * K * sizeof(T) of weights, y,
// and x once per block, from the L2 cache. Measured: docs/measurements.md, "Big pairs on one H200".
//
// Who adds what, and in which order, follows from N and K: a token gives the same bits alone and among others.
#pragma once

#include <cooperative_groups.h>

#include "chip.cuh"
#include "common.cuh"
#include "tree_tile.cuh"

namespace trt_eagle3 {

constexpr int kWideTokens = 64;
static_assert(kWideTokens == kMaxLinearRows);
constexpr int kWideColumns = 128;           // of a stage
constexpr int kWideRingBytes = 208 * 1024;  // at most

// kWarpgroups with 64 rows of W each.
template <typename Element, int kWarpgroups>
struct WideTile {
  using T = Element;
  static constexpr int Threads = kWarpgroups * 128;
  static constexpr int Rows = kWarpgroups * 64;
  static constexpr int TokenBytes = kWideTokens * kWideColumns * 2;
  static constexpr int StageBytes = TokenBytes + Rows * kWideColumns * 2;
  static constexpr int Stages = kWideRingBytes / StageBytes;
  static constexpr int SharedBytes = Stages * StageBytes;
  static constexpr int SumPitch = Rows + 4;  // floats between the tokens of the sums: no bank conflicts
  static_assert(Stages >= 3 && kWideTokens * SumPitch * 4 <= SharedBytes);
};

// A block's share: rows of W from first_row on, `count` stages of K from first_stage on.
struct WideShare {
  int first_row, first_stage, count;
};

// Starts the copies of one stage's columns of kCount rows of `source`, the first of which is `first`; of those past the
// last one none with kSkip, else the last one again.
template <typename Tile, int kCount, bool kSkip>
__device__ __forceinline__ void load_panel(const void* source, int first, int num_rows, int inner, int column,
                                           uint32_t target) {
  constexpr int kChunks = kWideColumns / 8, kSteps = ceil_div(kCount * kChunks, Tile::Threads);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int i = step * Tile::Threads + threadIdx.x, row = i / kChunks, chunk = i % kChunks;
    if (kCount * kChunks % Tile::Threads != 0 && row >= kCount) break;
    if (kSkip && first + row >= num_rows) break;
    const int64_t place = static_cast<int64_t>(min(first + row, num_rows - 1)) * inner + column + chunk * 8;
    copy_async16(target + tile_offset<kWideColumns>(row, chunk, kCount),
                 static_cast<const typename Tile::T*>(source) + place, 16);
  }
}

// Stage `index` of the share, in the ring: 64 tokens, then the rows of W.
template <typename Tile>
__device__ __forceinline__ void load_weights(const LinearParams& p, const WideShare& s, int index, uint32_t ring) {
  load_panel<Tile, Tile::Rows, false>(p.weight, s.first_row, p.outer, p.inner, (s.first_stage + index) * kWideColumns,
                                      ring + index % Tile::Stages * Tile::StageBytes + Tile::TokenBytes);
}
template <typename Tile>
__device__ __forceinline__ void load_tokens(const LinearParams& p, const WideShare& s, int index, uint32_t ring) {
  load_panel<Tile, kWideTokens, true>(p.x, 0, p.num_rows, p.inner, (s.first_stage + index) * kWideColumns,
                                      ring + index % Tile::Stages * Tile::StageBytes);
}

// Sums of a warpgroup's 64 rows: [tokens / 8][4]. Those of tokens that are not there are of whatever the ring held.
using WideSums = float[kWideTokens / 8][4];

#if TRT_EAGLE3_HAS_WGMMA

// Begins sums += W . x^T of a stage.
template <typename Tile>
__device__ __forceinline__ void start_stage(WideSums& sums, uint32_t stage) {
  const uint32_t weights = stage + Tile::TokenBytes + threadIdx.x / 128 * (64 * 128);
  wgmma_pin(sums);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kWideColumns / 16; ++step) {
    const uint32_t panel = step / 4, column = step % 4 * 32;
    const uint32_t a = weights + panel * Tile::Rows * 128 + column;
    const uint32_t b = stage + panel * kWideTokens * 128 + column;
    wgmma_ss<typename Tile::T>(sums, wgmma_descriptor(a, 16), wgmma_descriptor(b, 16), 1);
  }
  wgmma_commit();
}

// sums += W . x^T of the share, through the ring.
template <typename Tile>
__device__ __forceinline__ void multiply_share(const LinearParams& p, const WideShare& s, uint32_t ring,
                                               WideSums& sums) {
  constexpr int kAhead = Tile::Stages - 1;
#pragma unroll 1
  for (int i = 0; i < min(s.count, kAhead); ++i) load_weights<Tile>(p, s, i, ring);
  wait_for_previous();
#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) {
    if (i < s.count) load_tokens<Tile>(p, s, i, ring);
    copy_async_commit();
  }
#pragma unroll 1
  for (int i = 0; i < s.count; ++i) {
    copy_async_wait<kAhead - 1>();
    fence_async_proxy();
    wgmma_wait<0>();
    wgmma_pin(sums);
    __syncthreads();  // stage i is there, and nobody reads stage i - 1 any more
    start_stage<Tile>(sums, ring + i % Tile::Stages * Tile::StageBytes);
    if (i + kAhead < s.count) {
      load_weights<Tile>(p, s, i + kAhead, ring);
      load_tokens<Tile>(p, s, i + kAhead, ring);
    }
    copy_async_commit();
  }
  wgmma_wait<0>();
  wgmma_pin(sums);
}

#endif  // TRT_EAGLE3_HAS_WGMMA

// Leaves the sums in shared memory: [tokens][SumPitch].
template <typename Tile>
__device__ __forceinline__ void keep_sums(const WideSums& sums, int num_tokens, float* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kWideTokens / 8; ++j) {
    if (j * 8 >= num_tokens) break;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int token = j * 8 + lane % 4 * 2 + e % 2, row = warp * 16 + e / 2 * 8 + lane / 4;
      shared[token * Tile::SumPitch + row] = sums[j][e];
    }
  }
}

template <typename T>
__device__ __forceinline__ void store_four(const LinearParams& p, int token, int row, float4 v) {
  T* y = static_cast<T*>(p.y) + static_cast<int64_t>(token) * p.outer + row;
  if (p.outer % 4 == 0) {
    if (row < p.outer) *reinterpret_cast<uint2*>(y) = make_uint2(pack2<T>(v.x, v.y), pack2<T>(v.z, v.w));
    return;
  }
  const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (row + i < p.outer) y[i] = from_float<T>(values[i]);
  }
}

// Writes this block's part of the rows: the sums of both blocks of a cluster, or its own where there is no other.
template <typename Tile>
__device__ __forceinline__ void write_rows(const LinearParams& p, const WideShare& s, float* shared) {
#if __CUDA_ARCH__ >= 900
  auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
  const int size = gridDim.x, part = Tile::Rows / size, first = blockIdx.x * part;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.num_rows * (part / 4); i += Tile::Threads) {
    const int token = i / (part / 4), row = first + i % (part / 4) * 4;
    float* place = shared + token * Tile::SumPitch + row;
    float4 sum = *reinterpret_cast<const float4*>(cluster.map_shared_rank(place, 0));
    if (size > 1) {
      const float4 other = *reinterpret_cast<const float4*>(cluster.map_shared_rank(place, 1));
      sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
    }
    store_four<typename Tile::T>(p, token, s.first_row + row, sum);
  }
  cluster.sync();  // nobody leaves while the other one reads
#endif
}

// grid (1, or 2 blocks of a cluster; tiles of Tile::Rows rows of W).
template <typename Tile>
__global__ void __launch_bounds__(Tile::Threads, 1) linear_wide_kernel(const LinearParams p) {
#if TRT_EAGLE3_HAS_WGMMA
  extern __shared__ __align__(1024) char wide_shared[];
  const int stages = p.inner / kWideColumns, rank = blockIdx.x, size = gridDim.x, first = stages * rank / size;
  const WideShare s = {static_cast<int>(blockIdx.y) * Tile::Rows, first, stages * (rank + 1) / size - first};
  WideSums sums = {};
  multiply_share<Tile>(p, s, shared_address(wide_shared), sums);
  __syncthreads();  // the last products have read the ring
  float* kept = reinterpret_cast<float*>(wide_shared);
  keep_sums<Tile>(sums, p.num_rows, kept);
  write_rows<Tile>(p, s, kept);
#endif
}

template <typename Tile>
cudaError_t run_linear_wide(const LinearParams& p, const Chip& chip, int cluster, cudaStream_t stream) {
  if (Tile::SharedBytes > chip.shared_bytes) return cudaErrorNotSupported;
  const auto kernel = linear_wide_kernel<Tile>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, chip.shared_bytes);
  if (error != cudaSuccess) return error;
  const Overlap overlap = p.prefetch_safe != 0 ? Overlap::kYes : Overlap::kNo;
  return launch(overlap, kernel, dim3(cluster, ceil_div(p.outer, Tile::Rows)), Tile::Threads, Tile::SharedBytes,
                cluster, stream, p);
}

// From 17 tokens on, cuBLAS is as fast for a smaller weight (measured).
constexpr int64_t kWideLeastBytes = 64 << 20;

// Tiles of 64 rows of W while they fit the chip at once, two blocks each where those fit too; else tiles of 192.
template <typename T>
cudaError_t launch_linear_wide(const LinearParams& p, const Chip& chip, cudaStream_t stream) {
  if (!has_wgmma(chip) || p.inner % kWideColumns != 0) return cudaErrorNotSupported;
  if (p.num_rows > 16 && int64_t{sizeof(T)} * p.outer * p.inner < kWideLeastBytes) return cudaErrorNotSupported;
  const int tiles = ceil_div(p.outer, 64), cluster = 2 * tiles <= chip.sms && p.inner > kWideColumns ? 2 : 1;
  if (tiles <= chip.sms) return run_linear_wide<WideTile<T, 1>>(p, chip, cluster, stream);
  const int big_tiles = ceil_div(p.outer, 192), waves = ceil_div(big_tiles, chip.sms);
  if (waves > 1 && big_tiles * 5 < waves * chip.sms * 4) return cudaErrorNotSupported;  // a last wave with little to do
  return run_linear_wide<WideTile<T, 3>>(p, chip, 1, stream);
}

}  // namespace trt_eagle3
