// FusedMoe for up to 64 rows, where reading the weights of the experts that are needed is all the time there is.
//
// Idea: two launches, and no more of them for any routing. In both every block finds out by itself which experts the
// rows go through, from the router's logits, and reads its share of what those need: of gate_up a run of tiles of 8
// gate and 8 up rows (so that silu(gate) * up stays in a lane), cut evenly over the multiprocessors; of down 16 rows of
// every expert, so that a row of y is summed in one block, over the row's experts in the order of their probability.
// The second launch comes up beside the first one and has its first weights when that ends. Bytes moved: the weights of
// every expert that any row goes through once, an expert's again (from the L2 cache) for each 8 or 16 more rows; x and
// inner values. Measured: docs/measurements.md, "Mixture of experts".
//
// Who adds what, and in which order, follows from H, I and the weight's form alone: a row gives the same bits alone and
// among 63 others; with packed weights among up to 8, and among 9 to 64.
#pragma once

#include <algorithm>

#include "chip.cuh"
#include "moe_stream.cuh"

namespace trt_eagle3 {

constexpr int kMoePitch = 20;  // floats between the rows of a partial sum: no bank conflicts

// Tiles of 8 gate rows and the same 8 up rows; a group of warps takes every groups-th of the block's.
template <typename Block>
struct GateUpWork {
  static constexpr int Split = Block::GateUpSplit, Groups = Block::Warps / Split;
  const MoeTask& p;
  const MoeLists& lists;
  const ExpertWeight& weight;
  const void* source;
  const MoeRows<Block>& rows;
  float* partials;  // [2][warps][rows][pitch]
  int part_rows, tiles, first, group, part, items, rounds, high_rows;

  __device__ __forceinline__ GateUpWork(const MoeTask& p, const MoeLists& lists, const MoeRows<Block>& rows,
                                        float* partials, int num_units)
      : p(p), lists(lists), weight(p.gate_up), source(p.x), rows(rows), partials(partials) {
    const int warp = threadIdx.x / 32;
    part_rows = min(p.num_rows, Block::MaxRows);
    tiles = p.width / 8;
    const int total = num_units * tiles, block = blockIdx.x, blocks = gridDim.x;
    const int begin = static_cast<int>(int64_t{total} * block / blocks);
    const int end = static_cast<int>(int64_t{total} * (block + 1) / blocks);
    group = warp / Split;
    part = warp % Split;
    first = begin + group;
    items = max(0, ceil_div(end - first, Groups));
    rounds = max(0, ceil_div(ceil_div(p.hidden, kPackedSpan) - part, Split));
    high_rows = p.width;
  }
  __device__ __forceinline__ MoeUnit unit(int item) const {
    return MoeUnit::of(lists.units[(first + item * Groups) / tiles]);
  }
  __device__ __forceinline__ int row(int item) const { return (first + item * Groups) % tiles * 8; }
  static __device__ __forceinline__ int source_row(uint32_t slot) { return static_cast<int>(slot >> 16); }

  __device__ __forceinline__ void finish(int item, const MoeUnit& unit, const float (&sums)[Block::Tiles][4]) const {
    using T = typename Block::T;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, floats = part_rows * kMoePitch;
    float* buffer = partials + item % 2 * Block::Warps * floats;  // with two, nobody waits for who still reads the last
#pragma unroll
    for (int j = 0; j < Block::Tiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at = j * 8 + lane % 4 * 2 + e % 2;
        if (at < unit.rows) buffer[warp * floats + at * kMoePitch + lane / 4 + e / 2 * 8] = sums[j][e];
      }
    }
    named_barrier(1 + group, Split * 32);
    const float* parts = buffer + group * Split * floats;
#pragma unroll 1
    for (int i = threadIdx.x % (Split * 32); i < unit.rows * 8; i += Split * 32) {
      const float* own = parts + i / 8 * kMoePitch + i % 8;
      float gate = 0.0f, up = 0.0f;
#pragma unroll
      for (int w = 0; w < Split; ++w) {
        gate += own[w * floats];
        up += own[w * floats + 8];
      }
      const int64_t slot = lists.slots[unit.first + i / 8] & 0xFFFF;
      static_cast<T*>(p.inner)[slot * p.width + row(item) + i % 8] = from_float<T>(gate / (1.0f + expf(-gate)) * up);
    }
  }
};

// The block's 16 rows of every unit's expert.
template <typename Block>
struct DownWork {
  static constexpr int Split = Block::DownSplit, Groups = Block::Warps / Split;
  const MoeTask& p;
  const MoeLists& lists;
  const ExpertWeight& weight;
  const void* source;
  const MoeRows<Block>& rows;
  float* parts;  // [slots][Split][16]
  int group, part, items, rounds, high_rows;

  __device__ __forceinline__ DownWork(const MoeTask& p, const MoeLists& lists, const MoeRows<Block>& rows,
                                        float* parts, int num_units)
      : p(p), lists(lists), weight(p.down), source(p.inner), rows(rows), parts(parts) {
    const int warp = threadIdx.x / 32;
    group = warp / Split;
    part = warp % Split;
    items = max(0, ceil_div(num_units - group, Groups));
    rounds = max(0, ceil_div(ceil_div(p.width, kPackedSpan) - part, Split));
    high_rows = 8;
  }
  __device__ __forceinline__ MoeUnit unit(int item) const { return MoeUnit::of(lists.units[group + item * Groups]); }
  __device__ __forceinline__ int row(int) const { return blockIdx.x * kPackedRows; }
  static __device__ __forceinline__ int source_row(uint32_t slot) { return static_cast<int>(slot & 0xFFFF); }

  __device__ __forceinline__ void finish(int, const MoeUnit& unit, const float (&sums)[Block::Tiles][4]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < Block::Tiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at = j * 8 + lane % 4 * 2 + e % 2;
        if (at >= unit.rows) continue;
        const int slot = lists.slots[unit.first + at] & 0xFFFF;
        parts[(slot * Split + part) * kPackedRows + lane / 4 + e / 2 * 8] = sums[j][e];
      }
    }
  }

  // After all units: the rows of y.
  __device__ __forceinline__ void write() const {
    using T = typename Block::T;
#pragma unroll 1
    for (int i = threadIdx.x; i < p.num_rows * kPackedRows; i += Block::Threads) {
      const int token = i / kPackedRows, column = i % kPackedRows;
      float sum = 0.0f;
#pragma unroll 1
      for (int rank = 0; rank < p.top_k; ++rank) {
        const int slot = token * p.top_k + rank;
        float value = 0.0f;
#pragma unroll
        for (int s = 0; s < Split; ++s) value += parts[(slot * Split + s) * kPackedRows + column];
        sum += lists.shares[slot] * value;
      }
      static_cast<T*>(p.out)[int64_t{token} * p.hidden + blockIdx.x * kPackedRows + column] = from_float<T>(sum);
    }
  }
};

// Of shared memory: the warps' rings, resident rows, the lists, sums.
template <typename Block>
struct MoeShared {
  int rings, resident, lists;  // bytes

  __host__ __device__ MoeShared(const MoeTask& p, int slots, int num_rows, int inner) {
    rings = Block::Warps * slots * Block::slot_bytes(rows(p));
    resident = MoeRows<Block>::bytes(num_rows, inner);
    lists = MoeLists::bytes(p.num_rows * p.top_k, p.counted());
  }
  static __host__ __device__ MoeShared gate_up(const MoeTask& p, int slots) {
    return MoeShared(p, slots, p.num_rows, p.hidden);
  }
  static __host__ __device__ MoeShared down(const MoeTask& p, int slots) {
    return MoeShared(p, slots, p.num_rows * p.top_k, p.width);
  }
  static __host__ __device__ int rows(const MoeTask& p) {
    return p.num_rows < Block::MaxRows ? p.num_rows : Block::MaxRows;
  }
  __host__ __device__ int sums_place() const { return rings + resident + lists; }

  static int gate_up_bytes(const MoeTask& p, int slots) {
    return gate_up(p, slots).sums_place() + 2 * Block::Warps * rows(p) * kMoePitch * 4;
  }
  static int down_bytes(const MoeTask& p, int slots) {
    return down(p, slots).sums_place() + p.num_rows * p.top_k * Block::DownSplit * kPackedRows * 4;
  }
};

// grid: any number of blocks; they share the tiles of all units evenly.
template <typename Block>
__global__ void __launch_bounds__(Block::Threads, Block::BlocksPerSm)
    moe_gate_up_kernel(const __grid_constant__ MoeTask p, int slots) {
  using Work = GateUpWork<Block>;
  extern __shared__ __align__(16) char moe_shared[];
  const MoeShared<Block> shared = MoeShared<Block>::gate_up(p, slots);
  const MoeRows<Block> rows = MoeRows<Block>::at(moe_shared + shared.rings, p.num_rows, p.hidden);
  char* listed = moe_shared + shared.rings + shared.resident;
  const MoeLists lists = MoeLists::at(listed, p.num_rows * p.top_k, p.counted());
  clear_lists(p, lists);
  __syncthreads();
  wait_for_previous();
  const int num_units = make_lists<typename Block::T, false>(p, lists, Block::MaxRows, [&] {
    if (Block::Resident) rows.bring(p.x, p.num_rows);
  });
  const Work work(p, lists, rows, reinterpret_cast<float*>(moe_shared + shared.sums_place()), num_units);
  const char* ring = moe_shared + threadIdx.x / 32 * (shared.rings / Block::Warps);
  MoeReader<Block, Work> reader(work, shared_address(ring), slots, Block::slot_bytes(MoeShared<Block>::rows(p)));
#pragma unroll 1
  for (int i = 0; i < slots - 1; ++i) reader.template copy_next<true, true>();
  multiply_experts<Block>(work, reader, ring, slots);
}

// grid: tiles of 16 rows of down. Launched right after moe_gate_up_kernel, which comes up after everything before it has
// ended: logits and weights are there before this waits.
template <typename Block>
__global__ void __launch_bounds__(Block::Threads, Block::BlocksPerSm)
    moe_down_kernel(const __grid_constant__ MoeTask p, int slots) {
  using Work = DownWork<Block>;
  extern __shared__ __align__(16) char moe_shared[];
  const int num_slots = p.num_rows * p.top_k;
  const MoeShared<Block> shared = MoeShared<Block>::down(p, slots);
  const MoeRows<Block> rows = MoeRows<Block>::at(moe_shared + shared.rings, num_slots, p.width);
  const MoeLists lists = MoeLists::at(moe_shared + shared.rings + shared.resident, num_slots, p.counted());
  clear_lists(p, lists);
  __syncthreads();
  const int num_units = make_lists<typename Block::T, true>(p, lists, Block::MaxRows, [] {});
  const Work work(p, lists, rows, reinterpret_cast<float*>(moe_shared + shared.sums_place()), num_units);
  const char* ring = moe_shared + threadIdx.x / 32 * (shared.rings / Block::Warps);
  const int slot_bytes = Block::slot_bytes(MoeShared<Block>::rows(p));
  MoeReader<Block, Work> weights(work, shared_address(ring), slots, slot_bytes);
#pragma unroll 1
  for (int i = 0; i < slots - 1; ++i) weights.template copy_next<true, false>();
  wait_for_previous();
  if constexpr (Block::Resident) {
    rows.bring(p.inner, num_slots);
    __syncthreads();
    multiply_experts<Block>(work, weights, ring, slots);
  } else {
    MoeReader<Block, Work> reader(work, shared_address(ring), slots, slot_bytes);
#pragma unroll 1
    for (int i = 0; i < slots - 1; ++i) reader.template copy_next<false, true>();
    multiply_experts<Block>(work, reader, ring, slots);
  }
  __syncthreads();
  work.write();
}

// Slots of the ring of each warp, of both launches.
struct MoeSlots {
  int gate_up, down;
};

// As many as let a block of both launches be on a multiprocessor, as many in both, and what is left to gate_up, which
// reads more; or, where those are too few, as many as fit into it alone. 0: not even two do.
template <typename Block>
MoeSlots moe_slots(const MoeTask& p, const Chip& chip) {
  using Shared = MoeShared<Block>;
  constexpr int kReserved = 1024;  // of a block
  const int all = chip.shared_bytes + kReserved, fewest = Block::Packed ? 2 : 3;
  const auto beside = [&](int gate_up, int down) {
    return Shared::gate_up_bytes(p, gate_up) + Shared::down_bytes(p, down) + 2 * kReserved <= all;
  };
  MoeSlots slots = {kMoeMostSlots, kMoeMostSlots};
  while (slots.down >= fewest && !beside(slots.down, slots.down)) --slots.down;
  if (slots.down >= fewest && Block::BlocksPerSm == 2) {
    while (!beside(slots.gate_up, slots.down)) --slots.gate_up;
    return slots;
  }
  slots.down = kMoeMostSlots;
  while (slots.gate_up >= 2 && Shared::gate_up_bytes(p, slots.gate_up) > chip.shared_bytes) --slots.gate_up;
  while (slots.down >= 2 && Shared::down_bytes(p, slots.down) > chip.shared_bytes) --slots.down;
  return slots.gate_up >= 2 && slots.down >= 2 ? slots : MoeSlots{0, 0};
}

template <typename Block>
cudaError_t run_moe(const MoeTask& p, const Chip& chip, cudaStream_t stream) {
  using Shared = MoeShared<Block>;
  constexpr int kAllShared = 100;  // percent: the L1 cache has nothing to do here
  const MoeSlots slots = moe_slots<Block>(p, chip);
  if (slots.down == 0) return cudaErrorNotSupported;
  const auto gate_up = moe_gate_up_kernel<Block>;
  const auto down = moe_down_kernel<Block>;
  const auto most = cudaFuncAttributeMaxDynamicSharedMemorySize;
  cudaError_t error = cudaFuncSetAttribute(gate_up, most, chip.shared_bytes);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(down, most, chip.shared_bytes);
  if (error != cudaSuccess) return error;
  const int blocks = std::min(chip.sms, p.num_rows * p.top_k * (p.width / 8));
  error = launch_with_carveout(kAllShared, Overlap::kYes, gate_up, dim3(blocks), Block::Threads,
                               Shared::gate_up_bytes(p, slots.gate_up), 1, stream, p, slots.gate_up);
  if (error != cudaSuccess) return error;
  return launch_with_carveout(kAllShared, Overlap::kYes, down, dim3(p.hidden / kPackedRows), Block::Threads,
                              Shared::down_bytes(p, slots.down), 1, stream, p, slots.down);
}

// Whether rows are resident: of up to 8, where those of the most fit, so that fewer give the same bits.
template <typename Block>
bool moe_resident(const MoeTask& p, const Chip& chip) {
  MoeTask most = p;
  most.num_rows = 8;
  return p.num_rows <= 8 && moe_slots<Block>(most, chip).down > 0;
}

template <typename Format>
cudaError_t launch_moe(const MoeTask& p, cudaStream_t stream) {
  Chip chip;
  if (const cudaError_t error = Chip::current(&chip); error != cudaSuccess) return error;
  using Resident = MoeBlock<Format, 1, true>;
  using Few = MoeBlock<Format, 1, false>;
  using Many = MoeBlock<Format, Format::Bits == 16 ? 2 : 1, false>;
  if constexpr (Resident::Packed) {
    if (moe_resident<Resident>(p, chip)) return run_moe<Resident>(p, chip, stream);
  } else if (p.num_rows == 1) {
    return run_moe<Resident>(p, chip, stream);
  }
  return p.num_rows <= 8 ? run_moe<Few>(p, chip, stream) : run_moe<Many>(p, chip, stream);
}

}  // namespace trt_eagle3
