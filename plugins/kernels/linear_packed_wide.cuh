// Linear with a quantised weight, for up to 128 tokens: rows of W are the rows of Hopper's products, 32, 64 or 128
// tokens their columns, whoever of them is there.
//
// Idea: W comes through the warps' rings into the registers that become A of the products; x comes by the copy engine
// through a ring of stages of 128 columns in shared memory, which all warpgroups of a block share. One half of a stage
// is made numbers while the other is multiplied, and no warpgroup waits for another. The rows of a block and the
// cluster that splits K are chosen so that the chip is full and x is read seldom. Where scales change along K, the sums
// so far are rescaled by old / new scale, and no second set of sums is kept. Bytes moved: as linear_packed.cuh, and x
// once per block, from the L2 cache. Measured: docs/measurements.md, "Quantised weights".
//
// Who adds what, and in which order, follows from N, K and whether there are more than 32, or 64, tokens.
#pragma once

#include <cooperative_groups.h>

#include "barrier.cuh"
#include "linear_packed.cuh"
#include "tensor_map.cuh"
#include "wgmma_packed.cuh"

namespace trt_eagle3 {

constexpr int kPackedWideBytes = 226 * 1024;  // of shared memory, at most

// kWarpgroups with 64 rows of W each, and a warp that brings x.
template <typename Format, int kWarpgroups, int kMaxTokens>
struct PackedWideTile {
  using T = typename Format::T;
  static constexpr int Warps = kWarpgroups * 4;  // that multiply
  static constexpr int Threads = kWarpgroups * 128 + 32;
  static constexpr int Rows = kWarpgroups * 64;
  static constexpr int Tokens = kMaxTokens;
  static constexpr int PanelBytes = Tokens * 128;  // 64 columns of x
  static constexpr int StageBytes = 2 * PanelBytes;
  static constexpr int Stages = 4;
  static constexpr int BarrierBytes = 2 * Stages * 8;  // full and empty
  static constexpr int SlotBytes = kPackedSlotBytes<Format>;
  static constexpr int Fits = (kPackedWideBytes - Stages * StageBytes - BarrierBytes) / (Warps * SlotBytes);
  static constexpr int Slots = Fits < 8 ? Fits : 8;  // spans of a warp, one of which is being multiplied
  static constexpr int SlotsPlace = Stages * StageBytes;
  static constexpr int BarrierPlace = SlotsPlace + Warps * Slots * SlotBytes;
  static constexpr int SharedBytes = BarrierPlace + BarrierBytes;
  static constexpr int SumPitch = Rows + 4;  // floats between the tokens of the sums: no bank conflicts
  static_assert(Slots >= 3 && SlotBytes % 16 == 0 && Tokens * SumPitch * 4 <= BarrierPlace);
  using Sums = float[Tokens / 8][4];  // of a warpgroup's 64 rows

  // Tokens that a copy brings: no more than there are, for the copy engine takes longer to write zeros than to read.
  static __host__ __device__ constexpr int box(int num_tokens) { return num_tokens < Tokens ? num_tokens : Tokens; }
};

// A block's share: rows of W from first_row on, `count` stages of K from first_stage on.
struct PackedWideShare {
  int first_row, first_stage, count;
};

#if TRT_EAGLE3_HAS_WGMMA

// The stages of x in shared memory.
template <typename Tile>
struct PackedWideRing : StageRing<Tile::Stages, Tile::StageBytes, Tile::Warps> {
  // One lane brings the share's columns of x.
  __device__ __forceinline__ void fill(const CUtensorMap& map, const PackedWideShare& s, int num_tokens) const {
    const int bytes = Tile::box(num_tokens) * 4 * 64;
#pragma unroll 1
    for (int i = 0; i < s.count; ++i) {
      this->start(i, bytes);
      const int column = (s.first_stage + i) * kPackedSpan;
      const uint32_t stage = this->stage(i), full = this->full(i);
      copy_box(stage, &map, column, 0, full);
      copy_box(stage + Tile::PanelBytes, &map, column + 64, 0, full);
    }
  }
};

// The loop over a share's stages, of a warp that multiplies. No warp waits for one of another warpgroup.
template <typename Tile, typename Format>
struct PackedWideLoop {
  const PackedWeight& w;
  const PackedWideShare& s;
  const PackedWideRing<Tile>& ring;
  const char* slots;  // of this warp

  // Starts the copies of this warp's span of stage i.
  __device__ __forceinline__ void copy_span(PackedPlace<Format>& place, int i) const {
    if (i < s.count) place.copy(w, shared_address(slots) + i % Tile::Slots * Tile::SlotBytes);
    place.move(w, kPackedSpan);
    copy_async_commit();
  }

  __device__ __forceinline__ void run(typename Tile::Sums& sums) const {
    const int row = min(s.first_row + static_cast<int>(threadIdx.x) / 32 * kPackedRows, w.outer - kPackedRows);
    PackedPlace<Format> place;
    place.set(w, row + threadIdx.x % 32 / 4, s.first_stage * kPackedSpan);
#pragma unroll 1
    for (int i = 0; i < Tile::Slots - 1; ++i) copy_span(place, i);
    wait_for_previous();
    float scales[2] = {1.0f, 1.0f};
    const uint32_t first_scale = scale_index<Format>(w, s.first_stage * kPackedSpan);
#pragma unroll 1
    for (int i = 0; i < s.count; ++i) {
      copy_async_wait<Tile::Slots - 2>();
      __syncwarp();  // the other lanes' copies too; and all have read the slot before, which the next copies fill
      PackedSpan<Format> span;
      read_span<Format>(w, slots + i % Tile::Slots * Tile::SlotBytes, first_scale + i * Format::Groups, span);
      if (i == 0) {
        scales[0] = Format::scale(w, span.low_scale, 0);
        scales[1] = Format::scale(w, span.high_scale, 0);
      }
      copy_span(place, i + Tile::Slots - 1);
      multiply_packed_stage<Format, Tile::PanelBytes, false>(w, ring, i, span, scales, sums);
    }
    wgmma_wait<0>();
    wgmma_pin(sums);
    rescale(sums, scales[0], scales[1]);
  }
};

#endif  // TRT_EAGLE3_HAS_WGMMA

// Leaves the sums in shared memory: [tokens][SumPitch].
template <typename Tile>
__device__ __forceinline__ void keep_packed_sums(const typename Tile::Sums& sums, int num_tokens, float* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < Tile::Tokens / 8; ++j) {
    if (j * 8 >= num_tokens) break;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int token = j * 8 + lane % 4 * 2 + e % 2, row = warp * 16 + e / 2 * 8 + lane / 4;
      shared[token * Tile::SumPitch + row] = sums[j][e];
    }
  }
}

// Writes this block's part of the rows: the sums of all blocks of the cluster, in their order.
template <typename Tile>
__device__ __forceinline__ void write_packed_rows(const LinearParams& p, const PackedWideShare& s, float* shared) {
#if __CUDA_ARCH__ >= 900
  auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
  using T = typename Tile::T;
  const int size = gridDim.x, part = Tile::Rows / size, first = blockIdx.x * part;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.num_rows * (part / 4); i += Tile::Threads) {
    const int token = i / (part / 4), row = first + i % (part / 4) * 4;
    if (s.first_row + row >= p.outer) continue;
    float* place = shared + token * Tile::SumPitch + row;
    float4 sum = *reinterpret_cast<const float4*>(cluster.map_shared_rank(place, 0));
#pragma unroll 1
    for (int r = 1; r < size; ++r) {
      const float4 other = *reinterpret_cast<const float4*>(cluster.map_shared_rank(place, r));
      sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
    }
    T* y = static_cast<T*>(p.y) + static_cast<int64_t>(token) * p.outer + s.first_row + row;
    *reinterpret_cast<uint2*>(y) = make_uint2(pack2<T>(sum.x, sum.y), pack2<T>(sum.z, sum.w));
  }
  cluster.sync();  // nobody leaves while another one reads
#endif
}

// grid (blocks of a cluster; tiles of Tile::Rows rows of W).
template <typename Tile, typename Format>
__global__ void __launch_bounds__(Tile::Threads, 1)
    linear_packed_wide_kernel(const LinearParams p, const PackedWeight w, const __grid_constant__ CUtensorMap x) {
#if TRT_EAGLE3_HAS_WGMMA
  extern __shared__ __align__(1024) char packed_wide_shared[];
  const int stages = p.inner / kPackedSpan, rank = blockIdx.x, size = gridDim.x, first = stages * rank / size;
  const PackedWideShare s = {static_cast<int>(blockIdx.y) * Tile::Rows, first, stages * (rank + 1) / size - first};
  const uint32_t base = shared_address(packed_wide_shared);
  const PackedWideRing<Tile> ring{{base, base + Tile::BarrierPlace}};
  const int warp = threadIdx.x / 32;
  float* kept = reinterpret_cast<float*>(packed_wide_shared);
  if (threadIdx.x == 0) ring.init();
  __syncthreads();
  typename Tile::Sums sums = {};
  if (warp == Tile::Warps) {
    wait_for_previous();
    if (threadIdx.x % 32 == 0) ring.fill(x, s, p.num_rows);
    __syncwarp();
  } else {
    const char* slots = packed_wide_shared + Tile::SlotsPlace + warp * (Tile::Slots * Tile::SlotBytes);
    with_known_weight<Format>(w, [&](const PackedWeight& known) {
      PackedWideLoop<Tile, Format>{known, s, ring, slots}.run(sums);
    });
    copy_async_wait<0>();
  }
  __syncthreads();  // the last products have read the ring
  if (warp < Tile::Warps) keep_packed_sums<Tile>(sums, p.num_rows, kept);
  write_packed_rows<Tile>(p, s, kept);
#endif
}

// One way to cut a launch: rows of a block, blocks of a cluster, and how long it may take.
struct PackedWideGrid {
  int warpgroups, cluster;
  float us;
};

// Estimates a launch: waves of blocks, of whose stages each takes as long as a warp's chain of loads, conversions and
// products, as all warps' instructions, as what a block reads through the L2 cache, or as what all read from memory.
// The rates are an H200's; only their ratio counts.
inline float packed_wide_us(const LinearParams& p, int bits, int tokens, int rows, int cluster, int clusters) {
  constexpr float kBlockBytesPerUs = 80e3f, kChipBytesPerUs = 4.1e6f, kLaunchUs = 2.0f, kMergeUs = 0.7f;
  constexpr float kChainUs = 0.36f, kInstructionsUs = 0.17f, kFlopPerUs = 5e6f;
  const int stages = ceil_div(p.inner / kPackedSpan, cluster), tiles = ceil_div(p.outer, rows);
  const int waves = ceil_div(tiles, clusters);
  const float weight = rows * kPackedSpan / 8.0f * bits, x = 256.0f * tokens;
  const float at_once = static_cast<float>(std::min(tiles, clusters) * cluster);
  const float products = 256.0f * rows * tokens / kFlopPerUs;
  const float computing = std::max({kChainUs, rows / 64 * kInstructionsUs, products});
  const float reading = std::max((weight + x) / kBlockBytesPerUs, weight * at_once / kChipBytesPerUs);
  return waves * (kLaunchUs + (cluster > 1 ? kMergeUs : 0.0f) + stages * std::max(computing, reading));
}

template <typename Format, int kWarpgroups, int kTokens>
cudaError_t consider_packed_wide(const LinearParams& p, const Chip& chip, PackedWideGrid* best) {
  using Tile = PackedWideTile<Format, kWarpgroups, kTokens>;
  const auto kernel = linear_packed_wide_kernel<Tile, Format>;
  if (Tile::SharedBytes > chip.shared_bytes) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, chip.shared_bytes);
  if (error != cudaSuccess) return error;
  thread_local ClusterRoom known;
  for (int cluster = 1; cluster <= std::min(4, p.inner / kPackedSpan); cluster *= 2) {
    int clusters = 0;
    const cudaError_t found = cluster_room(kernel, chip, Tile::Threads, cluster, &known, &clusters);
    if (found == cudaErrorNotSupported) continue;
    if (found != cudaSuccess) return found;
    const float us = packed_wide_us(p, Format::Bits, kTokens, Tile::Rows, cluster, clusters);
    if (us < best->us) *best = {kWarpgroups, cluster, us};
  }
  return cudaSuccess;
}

template <typename Format, int kWarpgroups, int kTokens>
cudaError_t run_packed_wide(const LinearParams& p, const PackedWeight& w, int cluster, cudaStream_t stream) {
  using Tile = PackedWideTile<Format, kWarpgroups, kTokens>;
  const Overlap overlap = p.prefetch_safe != 0 ? Overlap::kYes : Overlap::kNo;
  CUtensorMap x;
  const cudaError_t error = describe_rows(p.dtype, p.x, p.num_rows, p.inner, Tile::box(p.num_rows), &x);
  if (error != cudaSuccess) return error;
  return launch(overlap, linear_packed_wide_kernel<Tile, Format>, dim3(cluster, ceil_div(p.outer, Tile::Rows)),
                Tile::Threads, Tile::SharedBytes, cluster, stream, p, w, x);
}

template <typename Format, int kTokens>
cudaError_t launch_packed_wide(const LinearParams& p, const PackedWeight& w, const Chip& chip, cudaStream_t stream) {
  PackedWideGrid best = {0, 0, 1e30f};
  cudaError_t error = consider_packed_wide<Format, 3, kTokens>(p, chip, &best);
  if (error == cudaSuccess) error = consider_packed_wide<Format, 2, kTokens>(p, chip, &best);
  if (error == cudaSuccess) error = consider_packed_wide<Format, 1, kTokens>(p, chip, &best);
  if (error != cudaSuccess) return error;
  if (best.warpgroups == 0) return cudaErrorNotSupported;
  if (best.warpgroups == 3) return run_packed_wide<Format, 3, kTokens>(p, w, best.cluster, stream);
  if (best.warpgroups == 2) return run_packed_wide<Format, 2, kTokens>(p, w, best.cluster, stream);
  return run_packed_wide<Format, 1, kTokens>(p, w, best.cluster, stream);
}

template <typename Format>
cudaError_t launch_linear_packed_wide(const LinearParams& p, const PackedWeight& w, const Chip& chip,
                                      cudaStream_t stream) {
  if (!has_wgmma(chip)) return cudaErrorNotSupported;
  if (p.num_rows <= 32) return launch_packed_wide<Format, 32>(p, w, chip, stream);
  if (p.num_rows <= 64) return launch_packed_wide<Format, 64>(p, w, chip, stream);
  return launch_packed_wide<Format, 128>(p, w, chip, stream);
}

// The form that suits the number of tokens and the chip.
template <typename Format>
cudaError_t launch_linear_packed(const LinearParams& p, const PackedWeight& w, cudaStream_t stream) {
  Chip chip;
  if (const cudaError_t error = Chip::current(&chip); error != cudaSuccess) return error;
  cudaError_t error = cudaErrorNotSupported;
  if (chip.major < 9 || chip.shared_bytes < kPackedLargeBytes) {
    if (p.num_rows <= 16) error = run_linear_packed_in_passes<PackedBlock<Format, 1, false>>(p, w, chip, stream);
    return error;
  }
  if (p.num_rows <= 8) {
    error = run_linear_packed<PackedBlock<Format, 1, true>>(p, w, chip, stream);
  } else if (p.num_rows <= 16) {
    error = run_linear_packed<PackedBlock<Format, 2, true>>(p, w, chip, stream);
  }
  return error != cudaErrorNotSupported ? error : launch_linear_packed_wide<Format>(p, w, chip, stream);
}

}  // namespace trt_eagle3
