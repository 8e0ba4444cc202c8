// A mixture's products over many rows with 16-bit weights: an expert's weight is A, its rows are the columns of Hopper's
// products, and both come by the copy engine.
//
// Idea: as moe_wide_packed.cuh, with up to 256 rows of an expert in a unit. One box brings 64 gate rows and the same 64
// up rows of gate_up in the order in which a warp wants them, 8 of each in turn. Bytes moved: each weight once for 256 rows
// (the next ones find it in the L2 cache); x once for 128 rows of weights, from the L2 cache; results. Measured:
// docs/measurements.md, "Mixture of experts".
#pragma once

#include "moe_units.cuh"
#include "tensor_map.cuh"
#include "wgmma_columns.cuh"

namespace trt_eagle3 {

struct DenseUnitTile {
  static constexpr int Warps = 8;                  // that multiply, each 16 rows of W
  static constexpr int Rows = Warps * 16;          // of an expert's weight, in a unit
  static constexpr int Threads = Warps * 32 + 32;  // and one that brings everything
  static constexpr int Tokens = 256;               // of a unit, at most
  static constexpr int Columns = 64;               // of a stage
  static constexpr int WeightBytes = Rows * Columns * 2;
  static constexpr int StageBytes = WeightBytes + Tokens * Columns * 2;
  static constexpr int Stages = 4;
  static constexpr int BarrierPlace = Stages * StageBytes;
  static constexpr int ListPlace = BarrierPlace + 2 * Stages * 8;
  static constexpr int SharedBytes = ListPlace + MoeWideLists::bytes(kMoeMaxExperts);
};

#if TRT_EAGLE3_HAS_WGMMA

// One lane brings weights and rows of all of the block's units.
template <typename Part>
__device__ __forceinline__ void bring_dense_units(const UnitRing<DenseUnitTile>& ring, const CUtensorMap& w,
                                                  const CUtensorMap& x, const MoeWideTask& task,
                                                  const MoeWideLists& lists, int stages) {
  using Tile = DenseUnitTile;
  constexpr int kBoxBytes = kWideBoxRows * Tile::Columns * 2;
  const int units = lists.num_units();
  int at = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < units; index += gridDim.x) {
    const MoeWideUnit unit = lists.unit(index);
    const int boxes = ceil_div(unit.rows, kWideBoxRows);
#pragma unroll 1
    for (int i = 0; i < stages; ++i, ++at) {
      ring.start(at, Tile::WeightBytes + boxes * kBoxBytes);
      const uint32_t stage = ring.stage(at), full = ring.full(at);
      const int column = i * Tile::Columns;
      Part::copy_weight(stage, &w, task, unit, column, full);
#pragma unroll 1
      for (int box = 0; box < boxes; ++box) {
        copy_box(stage + Tile::WeightBytes + box * kBoxBytes, &x, column, unit.first + box * kWideBoxRows, full);
      }
    }
  }
}

// A warp's share of all units of its block.
template <typename T, typename Part>
struct DenseUnitLoop {
  using Tile = DenseUnitTile;
  const MoeWideTask& task;
  const MoeWideLists& lists;
  const UnitRing<Tile>& ring;
  int stages;
  int at = 0;  // stages so far

  __device__ __forceinline__ void run() {
    const int units = lists.num_units();
#pragma unroll 1
    for (int index = blockIdx.x; index < units; index += gridDim.x) {
      const MoeWideUnit unit = lists.unit(index);
      switch (ceil_div(unit.rows, 32)) {
        case 1:
          multiply<4>(unit);
          break;
        case 2:
          multiply<8>(unit);
          break;
        case 3:
          multiply<12>(unit);
          break;
        case 4:
          multiply<16>(unit);
          break;
        case 5:
          multiply<20>(unit);
          break;
        case 6:
          multiply<24>(unit);
          break;
        case 7:
          multiply<28>(unit);
          break;
        default:
          multiply<32>(unit);
      }
    }
  }

  template <int kTiles>
  __device__ __forceinline__ void multiply(const MoeWideUnit& unit) {
    constexpr int kGroupBytes = Tile::WeightBytes / 2;  // a warpgroup's 64 rows
    const int group = threadIdx.x / 128;
    float sums[kTiles][4] = {};
#pragma unroll 1
    for (int i = 0; i < stages; ++i, ++at) {
      ring.await(at);
      const uint64_t w = wgmma_descriptor(ring.stage(at) + group * kGroupBytes, 16);
      const uint64_t x = wgmma_descriptor(ring.stage(at) + Tile::WeightBytes, 16);
      wgmma_pin(sums);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < Tile::Columns / 16; ++k) wgmma_ss_inner<T>(sums, w + k * 32 / 16, x + k * 32 / 16);
      wgmma_commit();
      wgmma_wait<1>();
      if (at > 0) ring.release(at - 1);
    }
    wgmma_wait<0>();
    wgmma_pin(sums);
    Part::store(task, unit, threadIdx.x / 32, sums);
  }
};

#endif  // TRT_EAGLE3_HAS_WGMMA

// grid: any number of blocks, which share all units.
template <typename T, typename Part>
__global__ void __launch_bounds__(DenseUnitTile::Threads, 1)
    moe_wide_dense_kernel(const __grid_constant__ MoeWideTask task, const __grid_constant__ CUtensorMap w,
                          const __grid_constant__ CUtensorMap x) {
#if TRT_EAGLE3_HAS_WGMMA
  using Tile = DenseUnitTile;
  extern __shared__ __align__(1024) char moe_wide_shared[];
  const uint32_t base = shared_address(moe_wide_shared);
  const UnitRing<Tile> ring = {base, base + Tile::BarrierPlace};
  const MoeWideLists lists = MoeWideLists::at(moe_wide_shared + Tile::ListPlace, task.num_experts, Tile::Tokens,
                                              task.columns / Part::Columns);
  const int stages = task.weight.first.inner / Tile::Columns;
  if (threadIdx.x == 0) ring.init();
  wait_for_previous();
  lists.make(task.ends);
  if (threadIdx.x / 32 == Tile::Warps) {
    if (threadIdx.x % 32 == 0) bring_dense_units<Part>(ring, w, x, task, lists, stages);
    __syncwarp();
  } else {
    DenseUnitLoop<T, Part>{task, lists, ring, stages}.run();
  }
#endif
}

// x: T [rows, K].
template <typename T, typename Part>
cudaError_t run_moe_wide_dense(const MoeWideTask& task, DType dtype, const void* x, int rows, const Chip& chip,
                               cudaStream_t stream) {
  using Tile = DenseUnitTile;
  if (Tile::SharedBytes > chip.shared_bytes) return cudaErrorNotSupported;
  CUtensorMap weights, map;
  cudaError_t error = Part::describe_weight(dtype, task, &weights);
  if (error != cudaSuccess) return error;
  error = describe_rows(dtype, x, rows, task.weight.first.inner, kWideBoxRows, &map);
  if (error != cudaSuccess) return error;
  const auto kernel = moe_wide_dense_kernel<T, Part>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::SharedBytes);
  if (error != cudaSuccess) return error;
  return launch(Overlap::kYes, kernel, dim3(chip.sms), Tile::Threads, Tile::SharedBytes, 1, stream, task, weights, map);
}

}  // namespace trt_eagle3
