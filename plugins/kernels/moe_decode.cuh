// FusedMoe for up to 64 rows, where reading the weights of the experts that are needed is all the time there is.
//
// Idea: two launches, and no more of them for any routing. In both every block finds out by itself which experts the
// rows go through, from the router's logits, and reads its share of what those need: of gate_up a run of tiles of 8
// gate and 8 up rows (so that silu(gate) * up stays in a lane), cut evenly over the multiprocessors; of down 16 rows of
// every expert, so that a row of y is summed in one block, over the row's experts in the order of their probability.
// The second launch comes up beside the first one and has its first weights when that ends. Bytes moved: the weights of
// every expert that any row goes through once, an expert's again (from the L2 cache) for as many rows more as
// a unit has; x and inner values. Measured: docs/measurements.md, "Mixture of experts".
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
                                        float* partials, int num_units, int unit_rows)
      : p(p), lists(lists), weight(p.gate_up), source(p.x), rows(rows), partials(partials), part_rows(unit_rows) {
    const int warp = threadIdx.x / 32;
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

  __device__ __forceinline__ void finish(int item, const MoeUnit& unit, const float (&sums)[4]) const {
    using T = typename Block::T;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, floats = part_rows * kMoePitch;
    float* buffer = partials + item % 2 * Block::Warps * floats;  // with two, nobody waits for who still reads the last
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = lane % 4 * 2 + e % 2;
      if (at < unit.rows) buffer[warp * floats + at * kMoePitch + lane / 4 + e / 2 * 8] = sums[e];
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

  __device__ __forceinline__ void finish(int, const MoeUnit& unit, const float (&sums)[4]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = lane % 4 * 2 + e % 2;
      if (at >= unit.rows) continue;
      const int slot = lists.slots[unit.first + at] & 0xFFFF;
      parts[(slot * Split + part) * kPackedRows + lane / 4 + e / 2 * 8] = sums[e];
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

// Each warp's ring: how many slots, of units of how many rows at most.
struct MoeRing {
  int slots, rows;
};

// Of shared memory: the warps' rings, resident rows, the lists, sums.
template <typename Block>
struct MoeShared {
  int rings, resident, lists;  // bytes

  __host__ __device__ MoeShared(const MoeTask& p, const MoeRing& ring, int num_rows, int inner) {
    rings = Block::Warps * ring.slots * Block::slot_bytes(ring.rows);
    resident = MoeRows<Block>::bytes(num_rows, inner);
    lists = MoeLists::bytes(p.num_rows * p.top_k, p.counted());
  }
  static __host__ __device__ MoeShared gate_up(const MoeTask& p, const MoeRing& ring) {
    return MoeShared(p, ring, p.num_rows, p.hidden);
  }
  static __host__ __device__ MoeShared down(const MoeTask& p, const MoeRing& ring) {
    return MoeShared(p, ring, p.num_rows * p.top_k, p.width);
  }
  __host__ __device__ int sums_place() const { return rings + resident + lists; }

  static int gate_up_bytes(const MoeTask& p, const MoeRing& ring) {
    return gate_up(p, ring).sums_place() + 2 * Block::Warps * ring.rows * kMoePitch * 4;
  }
  static int down_bytes(const MoeTask& p, const MoeRing& ring) {
    return down(p, ring).sums_place() + p.num_rows * p.top_k * Block::DownSplit * kPackedRows * 4;
  }
};

// grid: any number of blocks; they share the tiles of all units evenly.
template <typename Block>
__global__ void __launch_bounds__(Block::Threads, Block::BlocksPerSm)
    moe_gate_up_kernel(const __grid_constant__ MoeTask p, const MoeRing ring) {
  using Work = GateUpWork<Block>;
  extern __shared__ __align__(16) char moe_shared[];
  const MoeShared<Block> shared = MoeShared<Block>::gate_up(p, ring);
  const MoeRows<Block> rows = MoeRows<Block>::at(moe_shared + shared.rings, p.num_rows, p.hidden);
  char* listed = moe_shared + shared.rings + shared.resident;
  const MoeLists lists = MoeLists::at(listed, p.num_rows * p.top_k, p.counted());
  clear_lists(p, lists);
  __syncthreads();
  wait_for_previous();
  const int num_units = make_lists<typename Block::T, false>(p, lists, ring.rows, [&] {
    if (Block::Resident) rows.bring(p.x, p.num_rows);
  });
  const Work work(p, lists, rows, reinterpret_cast<float*>(moe_shared + shared.sums_place()), num_units, ring.rows);
  const char* slots = moe_shared + threadIdx.x / 32 * (shared.rings / Block::Warps);
  MoeReader<Block, Work> reader(work, shared_address(slots), ring.slots, Block::slot_bytes(ring.rows));
#pragma unroll 1
  for (int i = 0; i < ring.slots - 1; ++i) reader.template copy_next<true, true>();
  multiply_experts<Block>(work, reader, slots, ring.slots);
}

// grid: tiles of 16 rows of down. Launched right after moe_gate_up_kernel, which comes up after everything before it has
// ended: logits and weights are there before this waits.
template <typename Block>
__global__ void __launch_bounds__(Block::Threads, Block::BlocksPerSm)
    moe_down_kernel(const __grid_constant__ MoeTask p, const MoeRing ring) {
  using Work = DownWork<Block>;
  extern __shared__ __align__(16) char moe_shared[];
  const int num_slots = p.num_rows * p.top_k;
  const MoeShared<Block> shared = MoeShared<Block>::down(p, ring);
  const MoeRows<Block> rows = MoeRows<Block>::at(moe_shared + shared.rings, num_slots, p.width);
  const MoeLists lists = MoeLists::at(moe_shared + shared.rings + shared.resident, num_slots, p.counted());
  clear_lists(p, lists);
  __syncthreads();
  const int num_units = make_lists<typename Block::T, true>(p, lists, ring.rows, [] {});
  const Work work(p, lists, rows, reinterpret_cast<float*>(moe_shared + shared.sums_place()), num_units);
  const char* slots = moe_shared + threadIdx.x / 32 * (shared.rings / Block::Warps);
  const int slot_bytes = Block::slot_bytes(ring.rows);
  MoeReader<Block, Work> weights(work, shared_address(slots), ring.slots, slot_bytes);
#pragma unroll 1
  for (int i = 0; i < ring.slots - 1; ++i) weights.template copy_next<true, false>();
  wait_for_previous();
  if constexpr (Block::Resident) {
    rows.bring(p.inner, num_slots);
    __syncthreads();
    multiply_experts<Block>(work, weights, slots, ring.slots);
  } else {
    MoeReader<Block, Work> reader(work, shared_address(slots), ring.slots, slot_bytes);
#pragma unroll 1
    for (int i = 0; i < ring.slots - 1; ++i) reader.template copy_next<false, true>();
    multiply_experts<Block>(work, reader, slots, ring.slots);
  }
  __syncthreads();
  work.write();
}

// Of both launches.
struct MoeRings {
  MoeRing gate_up, down;
};

// The ring of a launch that has a multiprocessor to itself; bytes_of(ring) of its shared memory. Of units of as many rows
// as there can be, or, where two slots are all that fits so, of as few more than go through an expert as make it three:
// then two spans of a warp are on their way, and few experts become two units, the second's weights from the L2 cache.
template <typename Block, typename BytesOf>
MoeRing moe_ring_alone(const MoeTask& p, const Chip& chip, const BytesOf& bytes_of) {
  constexpr int kEnough = 3;
  const auto fitting = [&](int rows) {
    MoeRing ring = {kMoeMostSlots, rows};
    while (ring.slots >= 2 && bytes_of(ring) > chip.shared_bytes) --ring.slots;
    return ring;
  };
  const int most = std::min(p.num_rows, Block::MaxRows);
  const MoeRing largest = fitting(most);
  for (int rows = most; rows >= 4 && rows * 2 * p.num_experts >= p.num_rows * p.top_k * 3; rows -= 2) {
    const MoeRing ring = fitting(rows);
    if (ring.slots >= kEnough) return ring;
  }
  return largest;
}

// As many slots as let a block of both launches be on a multiprocessor, as many in both, and what is left to gate_up,
// which reads more; or, where those are too few, as many as fit into it alone. 0: not even two do.
template <typename Block>
MoeRings moe_rings(const MoeTask& p, const Chip& chip) {
  using Shared = MoeShared<Block>;
  constexpr int kReserved = 1024;  // of a block
  const int all = chip.shared_bytes + kReserved, fewest = Block::Packed ? 2 : 3;
  const int most = std::min(p.num_rows, Block::MaxRows);
  MoeRings rings = {{kMoeMostSlots, most}, {kMoeMostSlots, most}};
  const auto beside = [&] {
    return Shared::gate_up_bytes(p, rings.gate_up) + Shared::down_bytes(p, rings.down) + 2 * kReserved <= all;
  };
  for (; rings.down.slots >= fewest; --rings.down.slots) {
    rings.gate_up.slots = rings.down.slots;
    if (beside()) break;
  }
  if (rings.down.slots >= fewest && Block::BlocksPerSm == 2) {
    rings.gate_up.slots = kMoeMostSlots;
    while (!beside()) --rings.gate_up.slots;
    return rings;
  }
  rings.gate_up = moe_ring_alone<Block>(p, chip, [&](const MoeRing& r) { return Shared::gate_up_bytes(p, r); });
  rings.down = moe_ring_alone<Block>(p, chip, [&](const MoeRing& r) { return Shared::down_bytes(p, r); });
  return rings.gate_up.slots >= 2 && rings.down.slots >= 2 ? rings : MoeRings{};
}

template <typename Block>
cudaError_t run_moe(const MoeTask& p, const Chip& chip, cudaStream_t stream) {
  using Shared = MoeShared<Block>;
  constexpr int kAllShared = 100;  // percent: the L1 cache has nothing to do here
  const MoeRings rings = moe_rings<Block>(p, chip);
  if (rings.down.slots == 0) return cudaErrorNotSupported;
  const auto gate_up = moe_gate_up_kernel<Block>;
  const auto down = moe_down_kernel<Block>;
  const auto most = cudaFuncAttributeMaxDynamicSharedMemorySize;
  cudaError_t error = cudaFuncSetAttribute(gate_up, most, chip.shared_bytes);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(down, most, chip.shared_bytes);
  if (error != cudaSuccess) return error;
  const int blocks = std::min(chip.sms, p.num_rows * p.top_k * (p.width / 8));
  error = launch_with_carveout(kAllShared, Overlap::kYes, gate_up, dim3(blocks), Block::Threads,
                               Shared::gate_up_bytes(p, rings.gate_up), 1, stream, p, rings.gate_up);
  if (error != cudaSuccess) return error;
  return launch_with_carveout(kAllShared, Overlap::kYes, down, dim3(p.hidden / kPackedRows), Block::Threads,
                              Shared::down_bytes(p, rings.down), 1, stream, p, rings.down);
}

// Whether rows are resident: of up to 8, where those of the most fit, so that fewer give the same bits.
template <typename Block>
bool moe_resident(const MoeTask& p, const Chip& chip) {
  MoeTask most = p;
  most.num_rows = 8;
  return p.num_rows <= 8 && moe_rings<Block>(most, chip).down.slots > 0;
}

template <typename Format>
cudaError_t launch_moe_few(const MoeTask& p, const Chip& chip, cudaStream_t stream) {
  using Resident = MoeBlock<Format, true>;
  using Streamed = MoeBlock<Format, false>;
  if constexpr (Resident::Packed) {
    if (moe_resident<Resident>(p, chip)) return run_moe<Resident>(p, chip, stream);
  } else if (p.num_rows == 1) {
    return run_moe<Resident>(p, chip, stream);
  }
  return run_moe<Streamed>(p, chip, stream);
}

}  // namespace trt_eagle3
