// What blocks of linear_packed.cuh are made of: their shared memory, which part of a launch is theirs, and how weights
// come into their rings.
#pragma once

#include "cluster_room.cuh"
#include "packed_weight.cuh"

namespace trt_eagle3 {

constexpr int kPackedMaxCluster = 8;
static_assert(kPackedMaxCluster <= kMaxCluster);

// How a block is made. Large, for Hopper's shared memory: a block has a multiprocessor to itself, and most of its
// memory is for what is on its way, so that reading goes on while one launch ends and the next one waits for its x.
// (Blocks of two launches on a multiprocessor were slower: the later launch's lie where the earlier one's end first.)
template <typename Format, int kMaxTiles, bool kIsLarge>
struct PackedBlock {
  using Weight = Format;
  static constexpr int Tiles = kMaxTiles;  // of 8 tokens
  static constexpr bool Large = kIsLarge;
  static constexpr int Warps = Large ? 16 : 8;
  static constexpr int Threads = Warps * 32;
  static constexpr int MaxTokens = Tiles * 8;
  static constexpr int RowTiles = Large ? Format::RowTiles : 1;  // of 16 rows of W, that x is read for at once
  static constexpr int Rows = RowTiles * kPackedRows;
  static constexpr int Pitch = Rows + 4;  // floats between the tokens of a partial sum: no bank conflicts
  // Of partial sums: with two, a tile need not wait for the last.
  static constexpr int Buffers = Tiles * RowTiles == 1 ? 2 : 1;
  static constexpr int SpanBytes = kPackedSlotBytes<Format>, SlotBytes = RowTiles * SpanBytes;
  static constexpr int RingKiB = !Large ? 40 : Tiles * RowTiles == 4 ? 120 : 144;
  static constexpr int Slots = RingKiB * 1024 / (Warps * SlotBytes);  // of a warp, each of its tile's rows and a span
  static constexpr int RingBytes = Warps * Slots * SlotBytes;
  static_assert(Slots >= 2 && SlotBytes % 16 == 0);

  // Columns of W, in whole spans, of each block of a cluster.
  static __host__ __device__ constexpr int columns(int inner, int size) {
    return ceil_div(inner / kPackedSpan, size) * kPackedSpan;
  }
  // Bytes between the tokens of x: ldmatrix without bank conflicts.
  static __host__ __device__ constexpr int pitch(int inner, int size) { return columns(inner, size) * 2 + 16; }
  // Floats of the partial sums of a warp.
  static __host__ __device__ constexpr int partial(int num_rows) { return num_rows * Pitch; }
  // What XNotes wants.
  static __host__ __device__ constexpr int note_bytes(int inner, int size) {
    const int spans = columns(inner, size) / kPackedSpan;
    return (Format::InHalf ? spans * MaxTokens * 4 : 0) + (Format::Based ? spans * Format::Groups * MaxTokens * 4 : 0);
  }
  // Of shared memory: the warps' rings, notes of x, x, the warps' partial sums, then those of the cluster's blocks.
  static constexpr int bytes(int num_rows, int inner, int size) {
    return RingBytes + note_bytes(inner, size) + num_rows * pitch(inner, size) +
           Buffers * Warps * partial(num_rows) * 4;
  }
};

// What a launch is cut into. Tile i of a cluster is tile blockIdx.y + i * gridDim.y of W; a group takes every
// groups-th of those, its warps every split-th span.
struct PackedShare {
  int rank, size, split, groups, group, part;
  int first_column, num_spans, num_tiles, rounds;  // spans of this warp in a tile

  template <typename Block>
  static __device__ __forceinline__ PackedShare of(const PackedWeight& w, int split) {
    PackedShare s;
    const int warp = threadIdx.x / 32;
    s.rank = blockIdx.x;
    s.size = gridDim.x;
    s.split = split;
    s.groups = Block::Warps / split;
    s.group = warp / split;
    s.part = warp % split;
    const int columns = Block::columns(w.inner, s.size);
    s.first_column = min(s.rank * columns, w.inner);
    s.num_spans = (min(s.first_column + columns, w.inner) - s.first_column) / kPackedSpan;
    s.num_tiles = ceil_div(ceil_div(w.outer, Block::Rows) - static_cast<int>(blockIdx.y), gridDim.y);
    s.rounds = max(0, ceil_div(s.num_spans - s.part, split));
    return s;
  }
};

// The spans of a warp, in its order, on their way into its ring.
template <typename Block>
struct PackedReader {
  using Format = typename Block::Weight;
  PackedPlace<Format> place;
  uint32_t data_below, scale_below;  // bytes to the tile's other 16 rows: none where W has ended
  int tile, left;

  __device__ __forceinline__ void start(const PackedWeight& w, const PackedShare& s) {
    tile = s.rounds > 0 ? s.group : s.num_tiles;
    left = 0;
    set(w, s);
  }
  __device__ __forceinline__ void set(const PackedWeight& w, const PackedShare& s) {
    const int row = (static_cast<int>(blockIdx.y) + tile * static_cast<int>(gridDim.y)) * Block::Rows;
    place.set(w, row + threadIdx.x % 32 / 4, s.first_column + s.part * kPackedSpan);
    left = s.rounds;
    if constexpr (Block::RowTiles == 2) {
      const int rows = row + kPackedRows < w.outer ? kPackedRows : 0;
      data_below = rows * (w.inner * Format::Bits / 8);
      scale_below = Format::scale_row_bytes(w, rows);
    }
  }
  __device__ __forceinline__ void copy_next(const PackedWeight& w, const PackedShare& s, uint32_t slot) {
    if (tile < s.num_tiles) {
      place.copy(w, slot);
      if constexpr (Block::RowTiles == 2) {
        PackedPlace<Format> below = place;
        below.data += data_below;
        below.scale += scale_below;
        below.copy(w, slot + Block::SpanBytes);
      }
      place.move(w, s.split * kPackedSpan);
      if (--left == 0) {
        tile += s.groups;
        set(w, s);
      }
    }
    copy_async_commit();
  }
};

}  // namespace trt_eagle3
