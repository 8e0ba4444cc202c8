// How the weights of experts, and the rows that go through them, come to the tensor cores: a stream of spans through
// each warp's ring in shared memory, which does not stop where one unit ends and the next begins.
//
// A slot of the ring holds a span of a weight (packed_weight.cuh: 16 rows by 128 columns) and, where x is not resident,
// the same columns of the unit's rows of x.
#pragma once

#include "barrier.cuh"
#include "moe_rows.cuh"

namespace trt_eagle3 {

// How a block is made. Dense weights are copied as fast as they are multiplied by eight warps; making numbers of codes
// takes sixteen.
template <typename Format, bool kResident>
struct MoeBlock {
  using Weight = Format;
  using T = typename Format::T;
  static constexpr bool Packed = Format::Bits < 16, Resident = kResident;
  static constexpr int Warps = Packed ? 16 : 8, Threads = 32 * Warps;
  static constexpr int MaxRows = 8;      // of a unit: what a product takes
  // Whose registers must fit. Rings with packed weights' rows leave no room for a second block's.
  static constexpr int BlocksPerSm = Packed && !Resident ? 1 : 2;
  static constexpr int GateUpSplit = 4;  // warps that share the columns of a tile
  static constexpr int DownSplit = Packed ? 2 : 1;
  // Bytes between rows of x in a slot: no bank conflicts, of 16-byte reads or of ldmatrix.
  static constexpr int Pitch = kPackedSpan * 2 + (Packed ? 16 : 64);
  static constexpr int WeightBytes = kPackedSlotBytes<Format>;

  static __host__ __device__ constexpr int slot_bytes(int rows) { return WeightBytes + (Resident ? 0 : rows * Pitch); }
};

// A unit, read from the lists.
struct MoeUnit {
  int expert, first, rows;

  static __device__ __forceinline__ MoeUnit of(uint32_t word) {
    return {static_cast<int>(word >> 16), static_cast<int>(word >> 4 & 0xFFF), static_cast<int>(word & 15) + 1};
  }
};

constexpr int kMoeMostSlots = 4;  // of a ring

// Waits until at most `pending` of this thread's groups of copies are on their way.
__device__ __forceinline__ void await_copies(int pending) {
  if (pending == 0) return copy_async_wait<0>();
  if (pending == 1) return copy_async_wait<1>();
  copy_async_wait<kMoeMostSlots - 2>();
}

// What a warp multiplies, one item after the other: tiles of 16 rows of an expert's weight, of which it has every
// split-th span.
//   Work::items, part, Split, rounds (spans of an item), high_rows; unit(item) and row(item): where its rows lie.
template <typename Block, typename Work>
struct MoeReader {
  using Format = typename Block::Weight;
  const Work& work;
  uint32_t ring, ring_bytes, slot_bytes, at;  // at: of the slot to fill, from the ring's beginning
  PackedPlace<Format> place;
  const uint32_t* list;
  int rows, item, left, column;

  __device__ __forceinline__ MoeReader(const Work& work, uint32_t ring, int slots, int slot_bytes)
      : work(work), ring(ring), ring_bytes(slots * slot_bytes), slot_bytes(slot_bytes), at(0) {
    item = work.rounds > 0 ? 0 : work.items;
    set();
  }

  __device__ __forceinline__ void set() {
    left = work.rounds;
    column = work.part * kPackedSpan;
    if (item >= work.items) return;
    const MoeUnit unit = work.unit(item);
    list = work.lists.slots + unit.first;
    rows = unit.rows;
    place.set(work.weight.of(unit.expert), work.row(item) + static_cast<int>(threadIdx.x) % 32 / 4, column,
              work.high_rows);
  }

  __device__ __forceinline__ void copy_weight(uint32_t slot) const {
    const PackedWeight& w = work.weight.first;
    if constexpr (Block::Packed) {
      place.copy(w, slot);
    } else {
      const uint32_t lane = threadIdx.x % 32, pieces = slot + lane * 16;
      const int limit = w.inner - column - static_cast<int>(lane) % 4 * 8;
#pragma unroll
      for (int i = 0; i < Format::Pieces; ++i) {
        const int bytes = i * 32 < limit ? 16 : 0;
        copy_async16(pieces + i * 1024, place.data + i * 64, bytes);
        copy_async16(pieces + i * 1024 + 512, place.data + place.high + i * 64, bytes);
      }
    }
  }

  // Sixteen lanes copy a row; rows that are not there are left as they are, for nothing of them is kept.
  __device__ __forceinline__ void copy_rows(uint32_t slot) const {
    const int lane = threadIdx.x % 32, inner = work.weight.first.inner, from = column + lane % 16 * 8;
    const int bytes = Block::Packed || from < inner ? 16 : 0;
    const char* source = static_cast<const char*>(work.source) + from * 2;
    const uint32_t target = slot + Block::WeightBytes + lane % 16 * 16;
#pragma unroll
    for (int i = 0; i < Block::MaxRows / 2; ++i) {
      const int row = i * 2 + lane / 16;
      if (i * 2 >= rows) break;
      if (row < rows) copy_async16(target + row * Block::Pitch, source + int64_t{2} * work.source_row(list[row]) * inner, bytes);
    }
  }

  template <bool kWeight, bool kRows>
  __device__ __forceinline__ void copy_next() {
    if (item < work.items) {
      if (kWeight) copy_weight(ring + at);
      if (kRows && !Block::Resident) copy_rows(ring + at);
      if constexpr (Block::Packed) {
        place.move(work.weight.first, Work::Split * kPackedSpan);
      } else {
        place.data += Work::Split * kPackedSpan * 2;
      }
      column += Work::Split * kPackedSpan;
      at = at + slot_bytes == ring_bytes ? 0 : at + slot_bytes;
      if (--left == 0) {
        ++item;
        set();
      }
    }
    copy_async_commit();
  }
};

// Where a lane finds its part of a unit's rows: an address, but for 256 bytes a span.
template <typename Block>
struct MoeOperand {
  uint32_t x;
  int first, second;  // resident: the rows whose sums this lane has

  // Rows past a unit's repeat its last; what becomes of them is not kept.
  template <typename Work>
  __device__ __forceinline__ void set(const Work& work, const MoeUnit& unit, int slot_rows) {
    const int lane = threadIdx.x % 32, own = Block::Packed ? lane % 8 : lane / 4;
    const int column = (Block::Packed ? lane / 8 : lane % 4) * 16;
    if constexpr (Block::Resident) {
      const uint32_t* list = work.lists.slots + unit.first;
      x = work.rows.at(work.source_row(list[min(own, unit.rows - 1)])) + column;
      first = work.source_row(list[min(lane % 4 * 2, unit.rows - 1)]);
      second = work.source_row(list[min(lane % 4 * 2 + 1, unit.rows - 1)]);
    } else {
      x = Block::WeightBytes + min(own, slot_rows - 1) * Block::Pitch + column;
    }
  }
};

// What zero points take of a product, of a group of columns.
template <typename Block>
__device__ __forceinline__ void start_sums(const PackedSpan<typename Block::Weight>& span, const MoeRows<Block>& rows,
                                           const MoeOperand<Block>& operand, int group, int index, float (&sums)[4]) {
  using Format = typename Block::Weight;
  const float low = Format::zero_of(span.low_scale, group), high = Format::zero_of(span.high_scale, group);
  const float first = rows.sums_of(operand.first)[index], second = rows.sums_of(operand.second)[index];
  sums[0] = -low * first;
  sums[1] = -low * second;
  sums[2] = -high * first;
  sums[3] = -high * second;
}

// sums += W . x^T of a span; x: what to add to the operand's address. column: of the span, in spans.
template <typename Block>
__device__ __forceinline__ void multiply_expert_span(const PackedWeight& w, const char* slot, int column,
                                                     const MoeRows<Block>& rows, const MoeOperand<Block>& operand,
                                                     uint32_t x, float (&sums)[4]) {
  using Format = typename Block::Weight;
  constexpr bool kHalf = Block::Resident && Format::InHalf, kBased = Block::Resident && Format::Based;
  using T = std::conditional_t<kHalf, __half, typename Block::T>;
  constexpr int kPerGroup = kPackedBlocks / Format::Groups;
  PackedSpan<Format> span;
  uint32_t index = 0;
  if constexpr (Block::Packed) index = scale_index<Format>(w, column * kPackedSpan);
  read_span<Format>(w, slot, index, span);
#pragma unroll
  for (int group = 0; group < Format::Groups; ++group) {
    float even[4] = {}, other[4] = {};  // two chains: a product need not wait for the last
    if constexpr (kBased) start_sums<Block>(span, rows, operand, group, column * Format::Groups + group, even);
#pragma unroll
    for (int block = group * kPerGroup; block < (group + 1) * kPerGroup; block += 2) {
      uint32_t first[4], second[4];
      if constexpr (kHalf) {
        Format::quick_operand(span, block, first);
        Format::quick_operand(span, block + 1, second);
      } else {
        Format::operand(span, block, first);
        Format::operand(span, block + 1, second);
      }
      uint32_t values[4];
      if constexpr (Block::Packed) {
        load_matrix4(values, operand.x + x + block * 32);
      } else {
        load_shared4(values, operand.x + x + block * 32);
      }
      mma<T>(even, first, values[0], values[1]);
      mma<T>(other, second, values[2], values[3]);
    }
    float low = 1.0f, high = 1.0f;
    float2 factor = make_float2(1.0f, 1.0f);
    if constexpr (Block::Packed) {
      low = Format::scale(w, span.low_scale, group);
      high = Format::scale(w, span.high_scale, group);
    }
    if constexpr (kHalf) factor = {rows.factors_of(operand.first)[column], rows.factors_of(operand.second)[column]};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float sum = even[e] + other[e];
      float scale = e < 2 ? low : high;
      if constexpr (kHalf) scale *= e % 2 == 0 ? factor.x : factor.y;
      sums[e] += sum * scale;
    }
  }
}

// The loop of a warp. `reader` has filled all slots but one. Work::finish(item, unit, sums) is called by every lane of
// the warps that share an item.
template <typename Block, typename Work>
__device__ __forceinline__ void multiply_experts(const Work& work, MoeReader<Block, Work>& reader, const char* ring,
                                                 int slots) {
  const PackedWeight& w = work.weight.first;
  const int slot_rows = (static_cast<int>(reader.slot_bytes) - Block::WeightBytes) / Block::Pitch;
  uint32_t at = 0;
  MoeOperand<Block> operand;
#pragma unroll 1
  for (int item = 0; item < work.items; ++item) {
    const MoeUnit unit = work.unit(item);
    operand.set(work, unit, slot_rows);
    float sums[4] = {};
#pragma unroll 1
    for (int round = 0; round < work.rounds; ++round) {
      await_copies(slots - 2);
      __syncwarp();  // the other lanes' copies too; and all have read the slot before, which the next copies fill
      reader.template copy_next<true, true>();
      const int column = work.part + round * Work::Split;
      const uint32_t x = Block::Resident ? column * kPackedSpan * 2 : reader.ring + at;
      multiply_expert_span<Block>(w, ring + at, column, work.rows, operand, x, sums);
      at = at + reader.slot_bytes == reader.ring_bytes ? 0 : at + reader.slot_bytes;
    }
    work.finish(item, unit, sums);
  }
}

}  // namespace trt_eagle3
