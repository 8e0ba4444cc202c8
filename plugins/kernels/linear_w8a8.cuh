// Linear with weight and activations of eight bits each, for any number of tokens: FP8 by FP8, or INT8 by INT8, on
// Hopper's byte products. Both lie packed (packed_weight.cuh): the order of columns is the same, and no product sees it.
//
// Idea: rows of W are the rows of the products, tokens their columns. The copy engine brings stages of 128 columns of
// both into a ring that a block's warpgroups share; each multiplies its 64 rows of W by all of the block's tokens, and
// no number is converted. Few tokens: the launch is cut as the packed kernels' are, so that the chip reads W at its
// bandwidth (a cluster splits K). Many: blocks that share rows of W run side by side. Scales of rows and tokens
// multiply the sums, in float32. Bytes moved: N * K, and M * K once per block, from the L2 cache.
// Measured: docs/measurements.md, "Quantised weights".
#pragma once

#include <cooperative_groups.h>

#include <algorithm>

#include "barrier.cuh"
#include "chip.cuh"
#include "cluster_room.cuh"
#include "common.cuh"
#include "tensor_map.cuh"
#include "wgmma_byte.cuh"

namespace trt_eagle3 {

constexpr int kByteStage = 128;                // columns of a stage
constexpr int kByteSharedBytes = 226 * 1024;   // at most

// kWarpgroups with 64 rows of W each, and one of which a lane brings both operands; kParts of kPart tokens.
template <typename Byte, int kWarpgroups, int kPart, int kParts>
struct ByteTile {
  using Sum = typename Byte::Sum;
  static constexpr int Warps = kWarpgroups * 4;  // that multiply
  static constexpr int Threads = kWarpgroups * 128 + 128;
  static constexpr bool TakesRegisters = Threads * (kPart * kParts / 2 + 32) > 65536;  // of those who load
  static constexpr int Rows = kWarpgroups * 64;
  static constexpr int Parts = kParts, Part = kPart, Tokens = kPart * kParts;
  static constexpr int XPlace = Rows * kByteStage;  // in a stage, behind W
  static constexpr int StageBytes = (Rows + Tokens) * kByteStage;

  // Tokens that a copy brings: no more than there are, for the copy engine takes longer to write zeros than to read.
  static __host__ __device__ constexpr int box(int num_tokens) { return num_tokens < Tokens ? num_tokens : Tokens; }
  static constexpr int Fits = (kByteSharedBytes - 256) / StageBytes;
  static constexpr int Stages = Fits < 8 ? Fits : 8;
  static constexpr int BarrierPlace = Stages * StageBytes;
  static constexpr int SharedBytes = BarrierPlace + 2 * Stages * 8;
  static constexpr int SumPitch = Rows + 4;  // numbers between the tokens of the sums: no bank conflicts
  static_assert(Stages >= 4 && Tokens * SumPitch * 4 <= BarrierPlace);
  using Sums = Sum[Parts][Part / 8][4];
};

// A block's share: rows of W and tokens from the first on, `count` stages of K from first_stage on.
struct ByteShare {
  int first_row, first_token, first_stage, count;
};

#if TRT_EAGLE3_HAS_WGMMA

// Barrier of the warps that multiply: those that load touch the ring no more, for each of its copies has been awaited.
constexpr int kByteRingRead = 1;

// The stages of both operands in shared memory.
template <typename Tile>
struct ByteRing : StageRing<Tile::Stages, Tile::StageBytes, Tile::Warps> {
  // One lane brings the share's columns; of W, which nobody writes, before the launch's turn has come.
  __device__ __forceinline__ void fill(const CUtensorMap& w, const CUtensorMap& x, const ByteShare& s,
                                       int num_tokens) const {
    const int ahead = min(s.count, Tile::Stages), bytes = (Tile::Rows + Tile::box(num_tokens)) * kByteStage;
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) {
      barrier_expect(this->full(i), bytes);
      copy_box(this->stage(i), &w, (s.first_stage + i) * kByteStage, s.first_row, this->full(i));
    }
    wait_for_previous();
#pragma unroll 1
    for (int i = 0; i < s.count; ++i) {
      const int column = (s.first_stage + i) * kByteStage;
      if (i >= Tile::Stages) {
        this->start(i, bytes);
        copy_box(this->stage(i), &w, column, s.first_row, this->full(i));
      }
      copy_box(this->stage(i) + Tile::XPlace, &x, column, s.first_token, this->full(i));
    }
  }

  // sums += W . x^T, of a warp that multiplies.
  __device__ __forceinline__ void multiply(const ByteShare& s, typename Tile::Sums& sums) const {
    const uint32_t rows = threadIdx.x / 128 * (64 * kByteStage);
#pragma unroll 1
    for (int i = 0; i < s.count; ++i) {
      this->await(i);
      pin(sums);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kByteStage; k += 32) {
        const uint64_t a = wgmma_descriptor(this->stage(i) + rows + k, 16);
#pragma unroll
        for (int part = 0; part < Tile::Parts; ++part) {
          const uint32_t x = this->stage(i) + Tile::XPlace + part * (Tile::Part * kByteStage) + k;
          wgmma_bytes(sums[part], a, wgmma_descriptor(x, 16));
        }
      }
      wgmma_commit();
      wgmma_wait<1>();  // the stage before
      if (i > 0) this->release(i - 1);
    }
    wgmma_wait<0>();
    pin(sums);
  }

  // As wgmma_pin.
  static __device__ __forceinline__ void pin(typename Tile::Sums& sums) {
#pragma unroll
    for (int part = 0; part < Tile::Parts; ++part) {
#pragma unroll
      for (int j = 0; j < Tile::Part / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (std::is_same_v<typename Tile::Sum, float>) {
            asm volatile("" : "+f"(sums[part][j][e])::"memory");
          } else {
            asm volatile("" : "+r"(sums[part][j][e])::"memory");
          }
        }
      }
    }
  }
};

#endif  // TRT_EAGLE3_HAS_WGMMA

// Leaves the sums in shared memory: [tokens][SumPitch].
template <typename Tile>
__device__ __forceinline__ void keep_byte_sums(const typename Tile::Sums& sums, int num_tokens,
                                               typename Tile::Sum* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int part = 0; part < Tile::Parts; ++part) {
#pragma unroll
    for (int j = 0; j < Tile::Part / 8; ++j) {
      if (part * Tile::Part + j * 8 >= num_tokens) return;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = part * Tile::Part + j * 8 + lane % 4 * 2 + e % 2, row = warp * 16 + e / 2 * 8 + lane / 4;
        shared[token * Tile::SumPitch + row] = sums[part][j][e];
      }
    }
  }
}

template <typename T, typename Sum>
__device__ __forceinline__ void store_byte_rows(const LinearW8A8Params& p, int row, int token, const Sum (&sums)[4]) {
  const float x_scale = p.x_scale[token];
  const float4 scale = p.scale_rows == 1 ? make_float4(*p.scale, *p.scale, *p.scale, *p.scale)
                                         : *reinterpret_cast<const float4*>(p.scale + row);
  float values[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<Sum, float>) {
      values[i] = sums[i];
    } else {  // 128 is the codes' zero point; the sums of x's numbers stand behind their scales
      values[i] = static_cast<float>(sums[i] - 128 * static_cast<int>(p.x_scale[p.num_rows + token]));
    }
  }
  T* y = static_cast<T*>(p.y) + static_cast<int64_t>(token) * p.outer + row;
  *reinterpret_cast<uint2*>(y) =
      make_uint2(pack2<T>(values[0] * (scale.x * x_scale), values[1] * (scale.y * x_scale)),
                 pack2<T>(values[2] * (scale.z * x_scale), values[3] * (scale.w * x_scale)));
}

// Writes this block's part of the rows: the sums of all blocks of the cluster, in their order.
template <typename Tile>
__device__ __forceinline__ void write_byte_rows(const LinearW8A8Params& p, const ByteShare& s,
                                                typename Tile::Sum* shared) {
#if __CUDA_ARCH__ >= 900
  using Sum = typename Tile::Sum;
  auto cluster = cooperative_groups::this_cluster();
  __syncthreads();  // the block's own sums: racecheck does not see that a cluster's barrier orders them
  cluster.sync();
  const int size = gridDim.x, part = Tile::Rows / size, first = blockIdx.x * part;
  const int tokens = min(p.num_rows - s.first_token, Tile::Tokens);
#pragma unroll 1
  for (int i = threadIdx.x; i < tokens * (part / 4); i += Tile::Threads) {
    const int token = i / (part / 4), row = first + i % (part / 4) * 4;
    if (s.first_row + row >= p.outer) continue;
    Sum sums[4] = {};
#pragma unroll 1
    for (int r = 0; r < size; ++r) {
      const Sum* place = cluster.map_shared_rank(shared + token * Tile::SumPitch + row, r);
      const uint4 other = *reinterpret_cast<const uint4*>(place);
      sums[0] += reinterpret_cast<const Sum&>(other.x);
      sums[1] += reinterpret_cast<const Sum&>(other.y);
      sums[2] += reinterpret_cast<const Sum&>(other.z);
      sums[3] += reinterpret_cast<const Sum&>(other.w);
    }
    if (p.dtype == DType::kFloat16) {
      store_byte_rows<__half>(p, s.first_row + row, s.first_token + token, sums);
    } else {
      store_byte_rows<__nv_bfloat16>(p, s.first_row + row, s.first_token + token, sums);
    }
  }
  cluster.sync();  // nobody leaves while another one reads
#endif
}

// grid (blocks of a cluster; tiles of tokens; tiles of Tile::Rows rows of W).
template <typename Tile>
__global__ void __launch_bounds__(Tile::Threads, 1)
    linear_w8a8_kernel(const LinearW8A8Params p, const __grid_constant__ CUtensorMap w,
                       const __grid_constant__ CUtensorMap x) {
#if TRT_EAGLE3_HAS_WGMMA
  extern __shared__ __align__(1024) char byte_shared[];
  const int stages = p.inner / kByteStage, rank = blockIdx.x, size = gridDim.x, first = stages * rank / size;
  const ByteShare s = {static_cast<int>(blockIdx.z) * Tile::Rows, static_cast<int>(blockIdx.y) * Tile::Tokens, first,
                       stages * (rank + 1) / size - first};
  const uint32_t base = shared_address(byte_shared);
  const ByteRing<Tile> ring{{base, base + Tile::BarrierPlace}};
  auto* kept = reinterpret_cast<typename Tile::Sum*>(byte_shared);
  if (threadIdx.x == 0) ring.init();
  __syncthreads();
  if (threadIdx.x >= Tile::Warps * 32) {
    if constexpr (Tile::TakesRegisters) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;\n");
    if (threadIdx.x == Tile::Warps * 32) {
      ring.fill(w, x, s, p.num_rows);
    } else {
      wait_for_previous();
    }
    __syncwarp();
  } else {
    if constexpr (Tile::TakesRegisters) asm volatile("setmaxnreg.inc.sync.aligned.u32 160;\n");
    typename Tile::Sums sums = {};
    wait_for_previous();
    ring.multiply(s, sums);
    named_barrier(kByteRingRead, Tile::Warps * 32);  // the last products have read the ring
    keep_byte_sums<Tile>(sums, p.num_rows - s.first_token, kept);
  }
  write_byte_rows<Tile>(p, s, kept);
#endif
}

// One way to cut a launch.
struct ByteGrid {
  int warpgroups, parts, cluster;
  float us;
};

// Estimates a launch: waves of blocks, of whose stages each takes as long as its products, as what it reads through the
// L2 cache, or as what all read from memory. The rates are an H200's; only their ratio counts.
inline float byte_us(const LinearW8A8Params& p, int tokens, int rows, int cluster, int clusters) {
  constexpr float kFlopPerUs = 10e6f, kBlockBytesPerUs = 80e3f, kChipBytesPerUs = 4.1e6f;
  constexpr float kLaunchUs = 2.0f, kMergeUs = 0.7f, kStoreBytesPerUs = 60e3f, kMergeBytesPerUs = 30e3f;
  const int stages = ceil_div(p.inner / kByteStage, cluster), parts = ceil_div(p.num_rows, tokens);
  const int tiles = ceil_div(p.outer, rows) * parts, waves = ceil_div(tiles, clusters);
  const float weight = 128.0f * rows, at_once = static_cast<float>(std::min(tiles, clusters) * cluster);
  const float computing = 256.0f * rows * tokens / kFlopPerUs;
  const float reading =
      std::max((weight + 128.0f * tokens) / kBlockBytesPerUs, weight * at_once / (kChipBytesPerUs * parts));
  const float sums = 4.0f * rows * tokens;
  const float ending = cluster > 1 ? sums / kMergeBytesPerUs + kMergeUs : sums / kStoreBytesPerUs;
  return waves * (kLaunchUs + ending + stages * std::max(computing, reading));
}

template <typename Tile>
cudaError_t consider_bytes(const LinearW8A8Params& p, const Chip& chip, ByteGrid* best) {
  const auto kernel = linear_w8a8_kernel<Tile>;
  if (Tile::SharedBytes > chip.shared_bytes) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, chip.shared_bytes);
  if (error != cudaSuccess) return error;
  thread_local ClusterRoom known;
  for (int cluster = 1; cluster <= std::min(4, p.inner / kByteStage); cluster *= 2) {
    int clusters = 0;
    const cudaError_t found = cluster_room(kernel, chip, Tile::Threads, cluster, &known, &clusters);
    if (found == cudaErrorNotSupported) continue;
    if (found != cudaSuccess) return found;
    const float us = byte_us(p, Tile::Tokens, Tile::Rows, cluster, clusters);
    if (us < best->us) *best = {Tile::Warps / 4, Tile::Parts, cluster, us};
  }
  return cudaSuccess;
}

template <typename Tile>
cudaError_t run_bytes(const LinearW8A8Params& p, int cluster, cudaStream_t stream) {
  const Overlap overlap = p.prefetch_safe != 0 ? Overlap::kYes : Overlap::kNo;
  CUtensorMap w, x;
  cudaError_t error = describe_byte_rows(p.weight, p.outer, p.inner, Tile::Rows, &w);
  if (error == cudaSuccess) error = describe_byte_rows(p.x, p.num_rows, p.inner, Tile::box(p.num_rows), &x);
  if (error != cudaSuccess) return error;
  const dim3 grid(cluster, ceil_div(p.num_rows, Tile::Tokens), ceil_div(p.outer, Tile::Rows));
  return launch(overlap, linear_w8a8_kernel<Tile>, grid, Tile::Threads, Tile::SharedBytes, cluster, stream, p, w, x);
}

template <typename Byte, int kPart, int kParts>
cudaError_t consider_parts(const LinearW8A8Params& p, const Chip& chip, ByteGrid* best) {
  cudaError_t error = consider_bytes<ByteTile<Byte, 3, kPart, kParts>>(p, chip, best);
  if (error == cudaSuccess) error = consider_bytes<ByteTile<Byte, 2, kPart, kParts>>(p, chip, best);
  if (error == cudaSuccess) error = consider_bytes<ByteTile<Byte, 1, kPart, kParts>>(p, chip, best);
  return error;
}

template <typename Byte, int kPart, int kParts>
cudaError_t run_parts(const LinearW8A8Params& p, const ByteGrid& grid, cudaStream_t stream) {
  if (grid.warpgroups == 3) return run_bytes<ByteTile<Byte, 3, kPart, kParts>>(p, grid.cluster, stream);
  if (grid.warpgroups == 2) return run_bytes<ByteTile<Byte, 2, kPart, kParts>>(p, grid.cluster, stream);
  return run_bytes<ByteTile<Byte, 1, kPart, kParts>>(p, grid.cluster, stream);
}

template <typename Byte>
cudaError_t launch_linear_w8a8(const LinearW8A8Params& p, cudaStream_t stream) {
  Chip chip;
  if (const cudaError_t error = Chip::current(&chip); error != cudaSuccess) return error;
  if (!has_wgmma(chip)) return cudaErrorNotSupported;
  ByteGrid best = {0, 0, 0, 1e30f};
  cudaError_t error;
  if (p.num_rows <= 64) {
    error = consider_parts<Byte, 64, 1>(p, chip, &best);
  } else {
    error = consider_parts<Byte, 128, 1>(p, chip, &best);
    if (error == cudaSuccess && p.num_rows > 128) error = consider_parts<Byte, 128, 2>(p, chip, &best);
  }
  if (error != cudaSuccess) return error;
  if (best.warpgroups == 0) return cudaErrorNotSupported;
  if (p.num_rows <= 64) return run_parts<Byte, 64, 1>(p, best, stream);
  return best.parts == 1 ? run_parts<Byte, 128, 1>(p, best, stream) : run_parts<Byte, 128, 2>(p, best, stream);
}

}  // namespace trt_eagle3
