// A mixture's products over many rows, which lie by expert (moe_rows.cu): what a launch is cut into, and where results go.
//
// Shapes: R rows of all experts together, K columns of x, N rows of each expert's weight, T bfloat16 or float16.
#pragma once

#include "barrier.cuh"
#include "moe_task.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

namespace trt_eagle3 {

constexpr int kWideBoxRows = 32;  // of x, that the copy engine brings at once

// One of the two products.
struct MoeWideTask {
  ExpertWeight weight;  // [N, K] of each expert
  const int32_t* ends;  // [E] of each expert's rows
  void* out;            // T [R, columns]
  int num_experts, columns;
};

// An expert, some of its rows, and some of its weight's.
struct MoeWideUnit {
  int expert, first, rows, tile;
};

// Of all units, in shared memory: E + 1 entries each.
struct MoeWideLists {
  int* begins;  // of each expert's rows
  int* groups;  // how many groups of rows the experts before have
  int num_experts, group_rows, tiles;

  static __host__ __device__ constexpr int bytes(int num_experts) { return (num_experts + 1) * 8; }

  // group_rows: of a unit, at most. tiles: of an expert's weight.
  static __device__ __forceinline__ MoeWideLists at(char* shared, int num_experts, int group_rows, int tiles) {
    int* begins = reinterpret_cast<int*>(shared);
    return {begins, begins + num_experts + 1, num_experts, group_rows, tiles};
  }
  // The whole block; nobody reads the lists before it has come back from here.
  __device__ __forceinline__ void make(const int32_t* ends) const {
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x, each = ceil_div(num_experts, 32);
      const int begin = min(lane * each, num_experts), end = min(begin + each, num_experts);
      const int first = begin == 0 ? 0 : ends[begin - 1];
      int own = 0, row = first;
#pragma unroll 1
      for (int e = begin; e < end; ++e) {
        own += ceil_div(ends[e] - row, group_rows);
        row = ends[e];
      }
      int group = own;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFFu, group, offset);
        group += lane >= offset ? other : 0;
      }
      if (lane == 31) {
        begins[num_experts] = ends[num_experts - 1];
        groups[num_experts] = group;
      }
      group -= own;
      row = first;
#pragma unroll 1
      for (int e = begin; e < end; ++e) {
        begins[e] = row;
        groups[e] = group;
        group += ceil_div(ends[e] - row, group_rows);
        row = ends[e];
      }
    }
    __syncthreads();
  }
  __device__ __forceinline__ int num_units() const { return groups[num_experts] * tiles; }

  // Units that multiply the same weights with different rows follow each other: the L2 cache reads them once. An
  // expert's groups of rows are about equal.
  __device__ __forceinline__ MoeWideUnit unit(int index) const {
    const int wanted = index / tiles;
    int low = 0, high = num_experts;  // groups[low] <= wanted
#pragma unroll 1
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (groups[middle] <= wanted) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int own = groups[low + 1] - groups[low], rows = begins[low + 1] - begins[low];
    const int local = index - groups[low] * tiles, tile = local / own;
    const int size = (ceil_div(rows, own) + 7) & ~7, first = (local - tile * own) * size;
    return {low, begins[low] + first, min(size, rows - first), tile};
  }
};

#if TRT_EAGLE3_HAS_WGMMA
// What one warp of a block fills and the others read.
template <typename Tile>
using UnitRing = StageRing<Tile::Stages, Tile::StageBytes, Tile::Warps>;
#endif

// Turns a matrix of 8 by 8 numbers of 16 bits around that lies in the warp's registers as products leave it.
__device__ __forceinline__ uint32_t transposed(uint32_t two) {
  uint32_t turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(turned) : "r"(two));
  return turned;
}

// A warp's tokens 8j + g, of unit.rows, get what their lanes hold of columns 2t and 2t + 1 from `column` on.
template <typename T>
__device__ __forceinline__ void store_two(const MoeWideTask& task, const MoeWideUnit& unit, int token, int column,
                                          uint32_t two) {
  if (token >= unit.rows) return;
  T* row = static_cast<T*>(task.out) + static_cast<int64_t>(unit.first + token) * task.columns;
  *reinterpret_cast<uint32_t*>(row + column + threadIdx.x % 4 * 2) = two;
}

// Of gate_up, kRows rows of an expert's weight in a unit: a warp has 8 gate rows and the same 8 up rows, so that silu(gate)
// * up stays in a lane.
template <typename T, int kRows>
struct GateUpPart {
  static constexpr int Columns = kRows / 2;  // of the result
  static __device__ __forceinline__ int row(int tile, int warp) { return tile * Columns + warp * 8; }
  static __device__ __forceinline__ int high_rows(const MoeWideTask& task) { return task.columns; }
  // Of a dense weight: 64 columns from `column` on; 8 gate rows, the same 8 up rows, and so on.
  static cudaError_t describe_weight(DType dtype, const MoeWideTask& task, CUtensorMap* map) {
    return describe_gate_up(dtype, task.weight.first.data, task.num_experts, task.columns, task.weight.first.inner,
                            kRows / 16, map);
  }
#if TRT_EAGLE3_HAS_WGMMA
  static __device__ __forceinline__ void copy_weight(uint32_t target, const CUtensorMap* map, const MoeWideTask&,
                                                     const MoeWideUnit& unit, int column, uint32_t barrier) {
    copy_box5(target, map, {column, 0, 0, row(unit.tile, 0) / 8, unit.expert}, barrier);
  }
#endif

  template <int kTiles>
  static __device__ __forceinline__ void store(const MoeWideTask& task, const MoeWideUnit& unit, int warp,
                                               const float (&sums)[kTiles][4]) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j * 8 >= unit.rows) break;
      const float first = silu<T>(sums[j][0]) * sums[j][2], second = silu<T>(sums[j][1]) * sums[j][3];
      const int token = j * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
      store_two<T>(task, unit, token, row(unit.tile, warp), transposed(pack2<T>(first, second)));
    }
  }
};

// Of down: a warp has 16 rows.
template <typename T, int kRows>
struct DownPart {
  static constexpr int Columns = kRows;  // of the result
  static __device__ __forceinline__ int row(int tile, int warp) { return tile * Columns + warp * 16; }
  static __device__ __forceinline__ int high_rows(const MoeWideTask&) { return 8; }
  // Of a dense weight: 64 columns from `column` on.
  static cudaError_t describe_weight(DType dtype, const MoeWideTask& task, CUtensorMap* map) {
    const PackedWeight& w = task.weight.first;
    return describe_rows(dtype, w.data, task.num_experts * task.columns, w.inner, kRows, map);
  }
#if TRT_EAGLE3_HAS_WGMMA
  static __device__ __forceinline__ void copy_weight(uint32_t target, const CUtensorMap* map, const MoeWideTask& task,
                                                     const MoeWideUnit& unit, int column, uint32_t barrier) {
    copy_box(target, map, column, unit.expert * task.columns + row(unit.tile, 0), barrier);
  }
#endif

  template <int kTiles>
  static __device__ __forceinline__ void store(const MoeWideTask& task, const MoeWideUnit& unit, int warp,
                                               const float (&sums)[kTiles][4]) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j * 8 >= unit.rows) break;
      const int token = j * 8 + static_cast<int>(threadIdx.x) % 32 / 4, column = row(unit.tile, warp);
      store_two<T>(task, unit, token, column, transposed(pack2<T>(sums[j][0], sums[j][1])));
      store_two<T>(task, unit, token, column + 8, transposed(pack2<T>(sums[j][2], sums[j][3])));
    }
  }
};

}  // namespace trt_eagle3
