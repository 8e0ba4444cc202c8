// Linear with a quantised weight, for a few tokens: as linear.cuh, reading half or a quarter of its bytes. This file:
// up to 16 tokens whose part of x fits into shared memory; linear_packed_wide.cuh: the others, up to 64.
//
// Idea: what a lane loads are whole operands (packed_weight.cuh), made numbers of T in registers right before the
// product; x, parts of K and their sums go as in linear.cuh. Bytes moved: N * K * bits / 8 and scales of weights, x, y.
// Measured: docs/measurements.md, "Quantised weights".
//
// Who adds what, and in which order, follows from N, K and whether there are more than 8 tokens.
#pragma once

#include "linear.cuh"
#include "packed_weight.cuh"

namespace trt_eagle3 {

static_assert(kPackedSpan == kLinearSpan && kPackedRows == kLinearRows);

// Bytes between the tokens of x in shared memory: no bank conflicts of ldmatrix.
__host__ __device__ constexpr int packed_x_pitch(int inner, int size) { return linear_columns(inner, size) * 2 + 16; }

template <typename Format>
__device__ __forceinline__ void load_packed_tile(const PackedWeight& w, const LinearShare& s, const LinearCursor& at,
                                                 PackedSpan<Format>& span) {
  const int column = at.column(s);
  if (at.tile >= s.num_tiles || column >= s.end_column) return;
  const int row = (s.first_tile + at.tile * s.tile_stride) * kLinearRows + threadIdx.x % 32 / 4;
  load_packed_span<Format>(w, row, column, span);
}

// sums += W . x^T of one span; x[j] is where this lane reads of tokens 8j to 8j + 7.
template <typename Format, int kTiles>
__device__ __forceinline__ void multiply_packed_span(const PackedWeight& w, const LinearShare& s,
                                                     const LinearCursor& at, const PackedSpan<Format>& span,
                                                     const uint32_t (&x)[kTiles], float (&sums)[kTiles][4]) {
  using T = typename Format::T;
  constexpr int kPerGroup = kPackedBlocks / Format::Groups;
  const int column = at.column(s);
  if (column >= s.end_column) return;
  const uint32_t offset = (column - s.first_column) * 2;
#pragma unroll
  for (int group = 0; group < Format::Groups; ++group) {
    float part[kTiles][4] = {};
#pragma unroll
    for (int block = group * kPerGroup; block < (group + 1) * kPerGroup; block += 2) {
      uint32_t first[4], second[4];
      Format::operand(span, block, first);
      Format::operand(span, block + 1, second);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        uint32_t values[4];
        load_matrix4(values, x[j] + offset + block * 32);
        mma<T>(part[j], first, values[0], values[1]);
        mma<T>(part[j], second, values[2], values[3]);
      }
    }
    const float low = Format::scale(w, span.low_scale, group), high = Format::scale(w, span.high_scale, group);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[j][e] += part[j][e] * (e < 2 ? low : high);
    }
  }
}

// grid (blocks of a cluster, clusters); each cluster takes every gridDim.y-th tile of 16 rows of W.
template <typename Format, int kTiles>
__global__ void __launch_bounds__(kLinearThreads, 1)
    linear_packed_kernel(const LinearParams p, const PackedWeight w, int slots) {
  using T = typename Format::T;
  using Merge = LinearMerge<T, kTiles>;
  extern __shared__ __align__(16) char shared[];
  const int rank = blockIdx.x, size = gridDim.x, lane = threadIdx.x % 32;
  const LinearShare s = linear_share(p, rank, size);
  const int pitch = packed_x_pitch(p.inner, size);
#if __CUDA_ARCH__ >= 900
  if (size > 1) Merge::cluster_arrive();  // awaited before the first push
#endif
  LinearCursor next = {0, 0}, at = {0, 0};
  PackedSpan<Format> spans[Format::Ahead];
#pragma unroll
  for (int i = 0; i < Format::Ahead; ++i) {
    load_packed_tile<Format>(w, s, next, spans[i]);
    next.advance(s);
  }
  wait_for_previous();  // a launch whose weight is not prefetch_safe did not come up before it could pass here
  start_tokens<T>(p, s, shared, pitch);

  uint32_t x[kTiles];  // tokens past the last repeat it; what becomes of them is not kept
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    x[j] = shared_address(shared + min(j * 8 + lane % 8, p.num_rows - 1) * pitch + lane / 8 * 16);
  }
  float* partials = reinterpret_cast<float*>(shared + (p.num_rows * pitch + 15) / 16 * 16);
  const Merge merge{p, s, partials, partials + LinearShared<kTiles>::PartialBytes / 4, rank, size, slots};
  float sums[kTiles][4] = {};
#pragma unroll 1
  while (at.tile < s.num_tiles) {
#pragma unroll
    for (int i = 0; i < Format::Ahead; ++i) {
      if (at.tile == s.num_tiles) break;
      if (at.tile == 0) await_tokens(at.round, s.rounds);
      multiply_packed_span<Format, kTiles>(w, s, at, spans[i], x, sums);
      load_packed_tile<Format>(w, s, next, spans[i]);
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
int packed_bytes(int num_rows, int inner, int size) {
  return num_rows * packed_x_pitch(inner, size) + LinearShared<kTiles>::PartialBytes;
}

constexpr int kPackedMaxCluster = 4;

// How many clusters of a size of this kernel the chip runs at once, a block on a multiprocessor.
template <typename Format, int kTiles>
cudaError_t packed_clusters(const Chip& chip, int size, int* clusters) {
  *clusters = chip.sms / size;
  if (size == 1) return cudaSuccess;
  thread_local int room[kPackedMaxCluster + 1] = {}, room_on = -1;
  if (room_on != chip.device) std::fill(std::begin(room), std::end(room), 0);
  room_on = chip.device;
  if (room[size] == 0) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(size, *clusters);
    config.blockDim = dim3(kLinearThreads);
    config.dynamicSmemBytes = chip.shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    const auto kernel = linear_packed_kernel<Format, kTiles>;
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&room[size], kernel, &config);
    if (error != cudaSuccess) return error;
  }
  *clusters = std::min(*clusters, room[size]);
  return *clusters > 0 ? cudaSuccess : cudaErrorNotSupported;
}

template <typename Format, int kTiles>
cudaError_t run_linear_packed(const LinearParams& p, const PackedWeight& w, const Chip& chip, cudaStream_t stream) {
  using Shared = LinearShared<kTiles>;
  const int largest = chip.major >= 9 ? kPackedMaxCluster : 1;
  int size = 1;  // chosen as for the most tokens, so that all are added alike
  while (size < largest && packed_bytes<kTiles>(Shared::MaxTokens, p.inner, size) > kLinearSharedBytes) size *= 2;
  const int bytes = packed_bytes<kTiles>(p.num_rows, p.inner, size);
  const int most = has_wgmma(chip) ? packed_bytes<kTiles>(Shared::MaxTokens, p.inner, size) : bytes;
  if (most > std::min(kLinearSharedBytes, chip.shared_bytes)) return cudaErrorNotSupported;
  const int slot = size > 1 ? size * p.num_rows * kLinearRows * 4 : 0;
  const int slots = slot == 0 ? 1 : std::min(kLinearMaxSlots, (chip.shared_bytes - bytes) / slot);
  if (slots == 0) return cudaErrorNotSupported;
  const auto kernel = linear_packed_kernel<Format, kTiles>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, chip.shared_bytes);
  if (error != cudaSuccess) return error;
  int clusters = 0;
  error = packed_clusters<Format, kTiles>(chip, size, &clusters);
  if (error != cudaSuccess) return error;
  clusters = std::min(clusters, ceil_div(p.outer, kLinearRows));
  const Overlap overlap = p.prefetch_safe != 0 ? Overlap::kYes : Overlap::kNo;
  return launch(overlap, kernel, dim3(size, clusters), kLinearThreads, bytes + slots * slot, size, stream, p, w, slots);
}

}  // namespace trt_eagle3
