// A mixture's products over many rows with quantised weights: as linear_packed_wide.cuh, of each expert with its rows.
//
// Idea: a block takes one unit after the other (an expert, up to 128 of its rows, 128 rows of its weight), and nothing
// stops between them: each warp's copies of weights run some spans ahead, into the next unit, and so do the boxes of x
// that one warp brings. As many tokens are multiplied as the unit has, in steps of 32. Bytes moved: each weight once
// for 128 rows (the next ones find it in the L2 cache); x once for 128 rows of weights, from the L2 cache; results.
// Measured: docs/measurements.md, "Mixture of experts".
#pragma once

#include "linear_packed.cuh"
#include "moe_units.cuh"
#include "tensor_map.cuh"
#include "wgmma_packed.cuh"

namespace trt_eagle3 {

template <typename Weight, int kWarpgroups, int kTokens>
struct PackedUnitTile {
  using Format = Weight;
  using T = typename Format::T;
  static constexpr int Warps = kWarpgroups * 4;    // that multiply, each 16 rows of W
  static constexpr int Rows = Warps * 16;          // of an expert's weight, in a unit
  static constexpr int Threads = Warps * 32 + 32;  // and one that brings x
  static constexpr int Tokens = kTokens;           // of a unit, at most
  static constexpr int PanelBytes = Tokens * 128;  // 64 columns of x
  static constexpr int StageBytes = 2 * PanelBytes;
  static constexpr int Stages = 4;
  static constexpr int BarrierBytes = 2 * Stages * 8;
  static constexpr int SlotBytes = kPackedSlotBytes<Format>;
  static constexpr int SharedBytes = 226 * 1024;
  static constexpr int SlotsPlace = Stages * StageBytes;
  static constexpr int Fits =
      (SharedBytes - SlotsPlace - BarrierBytes - MoeWideLists::bytes(kMoeMaxExperts)) / (Warps * SlotBytes);
  static constexpr int Slots = Fits < 8 ? Fits : 8;  // spans of a warp, one of which is being multiplied
  static constexpr int BarrierPlace = SlotsPlace + Warps * Slots * SlotBytes;
  static constexpr int ListPlace = BarrierPlace + BarrierBytes;
  static_assert(Slots >= 3 && SlotBytes % 16 == 0);
};

#if TRT_EAGLE3_HAS_WGMMA

// One lane brings the rows of all of the block's units.
template <typename Tile>
__device__ __forceinline__ void bring_units(const UnitRing<Tile>& ring, const CUtensorMap& x,
                                            const MoeWideLists& lists, int stages) {
  constexpr int kBoxBytes = kWideBoxRows * 128;
  const int units = lists.num_units();
  int at = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < units; index += gridDim.x) {
    const MoeWideUnit unit = lists.unit(index);
    const int boxes = ceil_div(unit.rows, kWideBoxRows);
#pragma unroll 1
    for (int i = 0; i < stages; ++i, ++at) {
      ring.start(at, 2 * boxes * kBoxBytes);
      const uint32_t stage = ring.stage(at), full = ring.full(at);
#pragma unroll 1
      for (int box = 0; box < boxes; ++box) {
        const int row = unit.first + box * kWideBoxRows, column = i * kPackedSpan;
        copy_box(stage + box * kBoxBytes, &x, column, row, full);
        copy_box(stage + Tile::PanelBytes + box * kBoxBytes, &x, column + 64, row, full);
      }
    }
  }
}

// The spans of a warp, of one unit after the other, on their way into its ring.
template <typename Tile, typename Part>
struct UnitReader {
  using Format = typename Tile::Format;
  const MoeWideTask& task;
  const ExpertWeight& experts;
  const MoeWideLists& lists;
  uint32_t slots;
  int stages, units, index, left, slot;
  PackedPlace<Format> place;

  __device__ __forceinline__ UnitReader(const MoeWideTask& task, const ExpertWeight& experts, const MoeWideLists& lists,
                                        uint32_t slots, int stages)
      : task(task), experts(experts), lists(lists), slots(slots), stages(stages), units(lists.num_units()),
        index(blockIdx.x), left(0), slot(0) {
    set();
  }
  __device__ __forceinline__ void set() {
    left = stages;
    if (index >= units) return;
    const MoeWideUnit unit = lists.unit(index);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    place.set(experts.of(unit.expert), Part::row(unit.tile, warp) + lane / 4, 0, Part::high_rows(task));
  }
  __device__ __forceinline__ void copy_next() {
    if (index < units) {
      place.copy(experts.first, slots + slot * Tile::SlotBytes);
      place.move(experts.first, kPackedSpan);
      if (--left == 0) {
        index += gridDim.x;
        set();
      }
    }
    copy_async_commit();
    slot = slot == Tile::Slots - 1 ? 0 : slot + 1;
  }
};

// A warp's share of all units of its block.
template <typename Tile, typename Part>
struct UnitLoop {
  using Format = typename Tile::Format;
  const MoeWideTask& task;
  const PackedWeight& w;
  const MoeWideLists& lists;
  const UnitRing<Tile>& ring;
  const char* slots;  // of this warp
  int stages;
  UnitReader<Tile, Part>& reader;
  int at = 0, slot = 0;  // stages of x so far; slot of the next span

  __device__ __forceinline__ void run() {
    const int units = lists.num_units();
#pragma unroll 1
    for (int i = 0; i < Tile::Slots - 1; ++i) reader.copy_next();
#pragma unroll 1
    for (int index = blockIdx.x; index < units; index += gridDim.x) {
      const MoeWideUnit unit = lists.unit(index);
      if constexpr (Tile::Tokens == 32) {
        multiply<4>(unit);
      } else if (unit.rows <= 32) {
        multiply<4>(unit);
      } else if (unit.rows <= 64) {
        multiply<8>(unit);
      } else if (unit.rows <= 96) {
        multiply<12>(unit);
      } else {
        multiply<16>(unit);
      }
    }
    copy_async_wait<0>();
  }

  template <int kTiles>
  __device__ __forceinline__ void multiply(const MoeWideUnit& unit) {
    float sums[kTiles][4] = {}, scales[2] = {1.0f, 1.0f};
    const uint32_t first_scale = scale_index<Format>(w, 0);
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      copy_async_wait<Tile::Slots - 2>();
      __syncwarp();  // the other lanes' copies too; and all have read the slot before, which the next copies fill
      PackedSpan<Format> span;
      read_span<Format>(w, slots + slot * Tile::SlotBytes, first_scale + i * Format::Groups, span);
      slot = slot == Tile::Slots - 1 ? 0 : slot + 1;
      if (i == 0) {
        scales[0] = Format::scale(w, span.low_scale, 0);
        scales[1] = Format::scale(w, span.high_scale, 0);
      }
      reader.copy_next();
      multiply_packed_stage<Format, Tile::PanelBytes, true>(w, ring, at, span, scales, sums);
      ++at;
    }
    rescale(sums, scales[0], scales[1]);
    Part::store(task, unit, threadIdx.x / 32, sums);
  }
};

#endif  // TRT_EAGLE3_HAS_WGMMA

// grid: any number of blocks, which share all units.
template <typename Tile, typename Part>
__global__ void __launch_bounds__(Tile::Threads, 1)
    moe_wide_packed_kernel(const __grid_constant__ MoeWideTask task, const __grid_constant__ CUtensorMap x) {
#if TRT_EAGLE3_HAS_WGMMA
  using Format = typename Tile::Format;
  extern __shared__ __align__(1024) char moe_wide_shared[];
  const uint32_t base = shared_address(moe_wide_shared);
  const UnitRing<Tile> ring = {base, base + Tile::BarrierPlace};
  const MoeWideLists lists = MoeWideLists::at(moe_wide_shared + Tile::ListPlace, task.num_experts, Tile::Tokens,
                                              task.columns / Part::Columns);
  const int warp = threadIdx.x / 32, stages = task.weight.first.inner / kPackedSpan;
  if (threadIdx.x == 0) ring.init();
  wait_for_previous();
  lists.make(task.ends);
  if (warp == Tile::Warps) {
    if (threadIdx.x % 32 == 0) bring_units<Tile>(ring, x, lists, stages);
    __syncwarp();
  } else {
    const char* slots = moe_wide_shared + Tile::SlotsPlace + warp * (Tile::Slots * Tile::SlotBytes);
    with_known_weight<Format>(task.weight.first, [&](const PackedWeight& known) {
      ExpertWeight experts = task.weight;
      experts.first = known;
      UnitReader<Tile, Part> reader(task, experts, lists, shared_address(slots), stages);
      UnitLoop<Tile, Part>{task, known, lists, ring, slots, stages, reader}.run();
    });
  }
#endif
}

// x: T [rows, K].
template <typename Tile, typename Part>
cudaError_t run_packed_units(const MoeWideTask& task, DType dtype, const void* x, int rows, const Chip& chip,
                             cudaStream_t stream) {
  if (Tile::SharedBytes > chip.shared_bytes) return cudaErrorNotSupported;
  CUtensorMap map;
  cudaError_t error = describe_rows(dtype, x, rows, task.weight.first.inner, kWideBoxRows, &map);
  if (error != cudaSuccess) return error;
  const auto kernel = moe_wide_packed_kernel<Tile, Part>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::SharedBytes);
  if (error != cudaSuccess) return error;
  return launch(Overlap::kYes, kernel, dim3(chip.sms), Tile::Threads, Tile::SharedBytes, 1, stream, task, map);
}

// Where an expert has few rows, what a warp waits for is more than what it computes: twice as many warps then.
constexpr int kFewRowsOfExpert = 20;  // on average

template <typename Format, template <typename, int> class Part>
cudaError_t run_moe_wide_packed(const MoeWideTask& task, DType dtype, const void* x, int rows, const Chip& chip,
                                cudaStream_t stream) {
  using T = typename Format::T;
  using Few = PackedUnitTile<Format, 4, 32>;
  using Many = PackedUnitTile<Format, 2, 128>;
  using FewPart = Part<T, Few::Rows>;
  if (rows <= kFewRowsOfExpert * task.num_experts && task.columns % FewPart::Columns == 0) {
    return run_packed_units<Few, FewPart>(task, dtype, x, rows, chip, stream);
  }
  return run_packed_units<Many, Part<T, Many::Rows>>(task, dtype, x, rows, chip, stream);
}

}  // namespace trt_eagle3
