// Linear with a quantised weight, for up to 64 tokens: rows of W are the rows of Hopper's products, 64 tokens their
// columns, whoever of them is there.
//
// Idea: W comes from memory straight into the registers that are A of the products, some spans ahead; x comes through a
// ring of stages of 128 columns in shared memory, which all warpgroups of a block share. A block has 128 or 192 rows,
// so that x is read seldom, and a cluster of up to four splits K, so that the chip is full. Where scales change along
// K, the sums so far are rescaled by old / new scale, and no second set of sums is kept. Bytes moved: as
// linear_packed.cuh, and x once per block, from the L2 cache. Measured: docs/measurements.md, "Quantised weights".
//
// Who adds what, and in which order, follows from N and K: a token gives the same bits alone and among others.
#pragma once

#include <cooperative_groups.h>

#include "linear_wide.cuh"
#include "packed_weight.cuh"

namespace trt_eagle3 {

static_assert(kPackedSpan == kWideColumns);
constexpr int kPackedWideMaxCluster = 4;

template <typename Element, int kWarpgroups>
struct PackedWideTile {
  using T = Element;
  static constexpr int Threads = kWarpgroups * 128;
  static constexpr int Rows = kWarpgroups * 64;
  static constexpr int StageBytes = kWideTokens * kWideColumns * 2;
  static constexpr int Stages = 8;
  static constexpr int SharedBytes = Stages * StageBytes;
  static constexpr int SumPitch = Rows + 4;  // floats between the tokens of the sums: no bank conflicts
  static_assert(kWideTokens * SumPitch * 4 <= SharedBytes);
};

#if TRT_EAGLE3_HAS_WGMMA

// d += A . B, A in registers, B in shared memory with the inner dimension contiguous.
template <typename T>
__device__ __forceinline__ void wgmma_rs_inner(WideSums& d, const uint32_t (&a)[4], uint64_t b) {
#define TRT_EAGLE3_WGMMA_RS_INNER(type)                                                                            \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                         \
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
               "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;\n"  \
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),         \
                 "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),         \
                 "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),         \
                 "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),         \
                 "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),         \
                 "+f"(d[7][2]), "+f"(d[7][3])                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
  if constexpr (std::is_same_v<T, __half>) {
    TRT_EAGLE3_WGMMA_RS_INNER("f16");
  } else {
    TRT_EAGLE3_WGMMA_RS_INNER("bf16");
  }
#undef TRT_EAGLE3_WGMMA_RS_INNER
}

__device__ __forceinline__ void rescale(WideSums& sums, float low, float high) {
#pragma unroll
  for (int j = 0; j < kWideTokens / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[j][e] *= e < 2 ? low : high;
  }
}

// Begins sums += W . x^T of the columns of one group of scales.
template <typename Format>
__device__ __forceinline__ void start_group(const PackedSpan<Format>& span, int group, uint32_t stage, WideSums& sums) {
  constexpr int kBlocks = kPackedBlocks / Format::Groups;
  uint32_t a[kBlocks][4];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) Format::operand(span, group * kBlocks + i, a[i]);
  wgmma_pin(sums);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const int block = group * kBlocks + i;
    const uint32_t b = stage + block / 4 * kWideTokens * 128 + block % 4 * 32;
    wgmma_rs_inner<typename Format::T>(sums, a[i], wgmma_descriptor(b, 16));
  }
  wgmma_commit();
}

// sums += W . x^T of one stage. The sums are those of numbers divided by `scales`, of rows g and g + 8.
template <typename Format>
__device__ __forceinline__ void multiply_stage(const PackedWeight& w, const PackedSpan<Format>& span, uint32_t stage,
                                               float (&scales)[2], WideSums& sums) {
#pragma unroll
  for (int group = 0; group < Format::Groups; ++group) {
    if (!Format::constant(w)) {
      const float low = Format::scale(w, span.low_scale, group), high = Format::scale(w, span.high_scale, group);
      if (group > 0) {
        wgmma_wait<0>();
        wgmma_pin(sums);
      }
      rescale(sums, scales[0] / low, scales[1] / high);
      scales[0] = low;
      scales[1] = high;
    }
    start_group<Format>(span, group, stage, sums);
  }
}

// sums = W . x^T of the share.
template <typename Tile, typename Format>
__device__ __forceinline__ void multiply_packed_share(const LinearParams& p, const PackedWeight& w, const WideShare& s,
                                                      uint32_t ring, WideSums& sums) {
  constexpr int kAhead = Tile::Stages - 1;
  const int row = s.first_row + threadIdx.x / 32 * kPackedRows + threadIdx.x % 32 / 4;
  PackedSpan<Format> spans[Format::Ahead];
#pragma unroll
  for (int i = 0; i < Format::Ahead; ++i) {
    if (i < s.count) load_packed_span<Format>(w, row, (s.first_stage + i) * kWideColumns, spans[i]);
  }
  wait_for_previous();
  const auto load_x = [&](int i) {
    if (i < s.count) {
      load_panel<Tile, kWideTokens, true>(p.x, 0, p.num_rows, p.inner, (s.first_stage + i) * kWideColumns,
                                          ring + i % Tile::Stages * Tile::StageBytes);
    }
    copy_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) load_x(i);
  float scales[2] = {Format::scale(w, spans[0].low_scale, 0), Format::scale(w, spans[0].high_scale, 0)};
#pragma unroll 1
  for (int first = 0; first < s.count; first += Format::Ahead) {
#pragma unroll
    for (int j = 0; j < Format::Ahead; ++j) {
      const int i = first + j;
      if (i >= s.count) break;
      copy_async_wait<kAhead - 1>();
      fence_async_proxy();
      wgmma_wait<0>();
      wgmma_pin(sums);
      __syncthreads();  // stage i is there, and nobody reads stage i - 1 any more
      load_x(i + kAhead);
      multiply_stage<Format>(w, spans[j], ring + i % Tile::Stages * Tile::StageBytes, scales, sums);
      const int later = i + Format::Ahead;
      if (later < s.count) load_packed_span<Format>(w, row, (s.first_stage + later) * kWideColumns, spans[j]);
    }
  }
  wgmma_wait<0>();
  wgmma_pin(sums);
  rescale(sums, scales[0], scales[1]);
}

#endif  // TRT_EAGLE3_HAS_WGMMA

// Writes this block's part of the rows: the sums of all blocks of the cluster, in their order.
template <typename Tile>
__device__ __forceinline__ void write_packed_rows(const LinearParams& p, const WideShare& s, float* shared) {
#if __CUDA_ARCH__ >= 900
  auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
  const int size = gridDim.x, part = Tile::Rows / size, first = blockIdx.x * part;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.num_rows * (part / 4); i += Tile::Threads) {
    const int token = i / (part / 4), row = first + i % (part / 4) * 4;
    float* place = shared + token * Tile::SumPitch + row;
    float4 sum = *reinterpret_cast<const float4*>(cluster.map_shared_rank(place, 0));
#pragma unroll 1
    for (int r = 1; r < size; ++r) {
      const float4 other = *reinterpret_cast<const float4*>(cluster.map_shared_rank(place, r));
      sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
    }
    store_four<typename Tile::T>(p, token, s.first_row + row, sum);
  }
  cluster.sync();  // nobody leaves while another one reads
#endif
}

// grid (blocks of a cluster; tiles of Tile::Rows rows of W).
template <typename Tile, typename Format>
__global__ void __launch_bounds__(Tile::Threads, 1)
    linear_packed_wide_kernel(const LinearParams p, const PackedWeight w) {
#if TRT_EAGLE3_HAS_WGMMA
  extern __shared__ __align__(1024) char packed_wide_shared[];
  const int stages = p.inner / kWideColumns, rank = blockIdx.x, size = gridDim.x, first = stages * rank / size;
  const WideShare s = {static_cast<int>(blockIdx.y) * Tile::Rows, first, stages * (rank + 1) / size - first};
  WideSums sums = {};
  multiply_packed_share<Tile, Format>(p, w, s, shared_address(packed_wide_shared), sums);
  __syncthreads();  // the last products have read the ring
  float* kept = reinterpret_cast<float*>(packed_wide_shared);
  keep_sums<Tile>(sums, p.num_rows, kept);
  write_packed_rows<Tile>(p, s, kept);
#endif
}

// How the rows and columns of W are dealt out.
struct PackedWideGrid {
  int rows, cluster;
  int64_t cost;
};

// The grid that takes the fewest rows x stages one after another; a block costs some stages by itself.
inline PackedWideGrid packed_wide_grid(int outer, int inner, int sms) {
  constexpr int kBlockStages = 4;
  PackedWideGrid best = {0, 0, INT64_MAX};
  for (const int rows : {192, 128}) {
    for (int cluster = 1; cluster <= kPackedWideMaxCluster; cluster *= 2) {
      const int stages = inner / kWideColumns, room = cluster == 4 ? sms / 16 * 16 : sms / cluster * cluster;
      if (cluster > stages || room == 0) continue;
      const int waves = ceil_div(ceil_div(outer, rows) * cluster, room);
      const int64_t cost = int64_t{waves} * rows * (ceil_div(stages, cluster) + kBlockStages);
      if (cost < best.cost) best = {rows, cluster, cost};
    }
  }
  return best;
}

template <typename Format, int kWarpgroups>
cudaError_t run_packed_wide(const LinearParams& p, const PackedWeight& w, const Chip& chip, int cluster,
                            cudaStream_t stream) {
  using Tile = PackedWideTile<typename Format::T, kWarpgroups>;
  if (Tile::SharedBytes > chip.shared_bytes) return cudaErrorNotSupported;
  const auto kernel = linear_packed_wide_kernel<Tile, Format>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, chip.shared_bytes);
  if (error != cudaSuccess) return error;
  const Overlap overlap = p.prefetch_safe != 0 ? Overlap::kYes : Overlap::kNo;
  return launch(overlap, kernel, dim3(cluster, ceil_div(p.outer, Tile::Rows)), Tile::Threads, Tile::SharedBytes,
                cluster, stream, p, w);
}

template <typename Format>
cudaError_t launch_linear_packed_wide(const LinearParams& p, const PackedWeight& w, const Chip& chip,
                                      cudaStream_t stream) {
  if (!has_wgmma(chip)) return cudaErrorNotSupported;
  const PackedWideGrid grid = packed_wide_grid(p.outer, p.inner, chip.sms);
  if (grid.rows == 192) return run_packed_wide<Format, 3>(p, w, chip, grid.cluster, stream);
  return run_packed_wide<Format, 2>(p, w, chip, grid.cluster, stream);
}

}  // namespace trt_eagle3
