// DenseLayer: what a decoder layer computes after its attention, and q, k, v of the next layer, for up to 16 rows, in one
// launch: middle = residual + x . o^T;  inner = silu(gate) * up of RMSNorm(middle);  total = middle + inner . down^T;
// y = RMSNorm(total) . qkv^T.
//
// Idea: a block on each multiprocessor stays for all four products. Each warp reads its share of all four weights as one
// sequence of spans into its own ring. No weight depends on a row, so copies run on while the blocks wait for each other
// between two products: memory is busy from the first byte to the last. Every block has a whole row of W at a time, so
// sums meet in one block; rows are brought from the L2 cache, and every block computes their norms for itself.
// Bytes moved: the four weights and their scales once; x, middle, inner and total, each block, from the L2 cache.
// Not measured yet.
//
// Who adds what, and in which order, follows from K alone: a row gives the same bits alone and among 15 others.
#pragma once

#include "barrier.cuh"
#include "chip.cuh"
#include "linear_packed.cuh"

namespace trt_eagle3 {

enum LayerStage { kLayerO, kLayerGateUp, kLayerDown, kLayerQkv, kLayerStages };

// One layer. Without norms[1] there is no qkv, and total is inner . down^T alone.
struct LayerTask {
  PackedWeight weights[kLayerStages];
  const void *x, *residual;
  const void* norms[2];
  void *middle, *inner, *total, *y;
  uint32_t* barrier;
  float epsilon, weight_offset;
  int32_t num_rows, hidden, width;  // width: of inner
  int32_t num_stages;               // 3, or 4 with qkv

  // How a block's shared memory is cut.
  int32_t slots;      // of a warp's ring
  int32_t x_columns;  // that x has room for: all of them, or a multiple of kLayerWarps spans
};

constexpr int kLayerMaxRows = 16;
constexpr int kLayerWarps = 8;                          // that multiply; one more passes the barrier
constexpr int kLayerThreads = (kLayerWarps + 1) * 32;
constexpr int kLayerSegment = 256;                      // columns of a row that a warp norms at once
constexpr int kLayerMaxSegments = 32;                   // of a row

template <typename Format, int kTiles>
struct LayerBlock {
  using Weight = Format;
  static constexpr int Tiles = kTiles, RowTiles = 2, MaxTokens = kTiles * 8;  // tiles: of 8 rows of x
  static constexpr int Rows = RowTiles * kPackedRows, Pitch = Rows + 4;       // floats: no bank conflicts
  static constexpr int SpanBytes = kPackedSlotBytes<Format>, SlotBytes = RowTiles * SpanBytes;
  static constexpr int XNoteFloats = (Format::InHalf ? 1 : 0) + (Format::Based ? Format::Groups : 0);
  static_assert(SlotBytes % 16 == 0);

  static __host__ __device__ constexpr int pitch(int columns) { return columns * 2 + 16; }
  static __host__ __device__ constexpr int ring_bytes(int slots) { return kLayerWarps * slots * SlotBytes; }
  static __host__ __device__ constexpr int note_bytes(int columns) {
    return columns / kPackedSpan * MaxTokens * XNoteFloats * 4;
  }
  // Partial sums of all warps, for 8 rows of x at a time.
  static __host__ __device__ constexpr int partial_floats(int num_rows) { return (num_rows < 8 ? num_rows : 8) * Pitch; }
  static constexpr int bytes(int num_rows, int columns, int slots) {
    return ring_bytes(slots) + note_bytes(columns) + num_rows * pitch(columns) +
           kLayerWarps * partial_floats(num_rows) * 4;
  }
};

// Waits until every block of the grid has come here; what they wrote before is visible after. One thread of each block,
// between two __syncthreads(). The word's lower bits are 0 before and after, for grids of any size; its sign changes.
__device__ __forceinline__ void pass_grid_barrier(uint32_t* word) {
  constexpr uint32_t kSign = 0x80000000u;
  const uint32_t own = blockIdx.x == 0 ? kSign - (gridDim.x - 1) : 1;
  uint32_t before, now;
  asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;\n" : "=r"(before) : "l"(word), "r"(own) : "memory");
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(now) : "l"(word) : "memory");
  } while (((before ^ now) & kSign) == 0);
}

// A block's part of a product. A tile is two times 16 rows of W: neighbours, or of gate and of up. Where W's rows end
// with the first half, the second half repeats it, and is not stored.
struct LayerShare {
  int first_unit, end_unit;  // 16 rows of W, or of both gate and up
  int num_tiles, num_spans;
  bool pairs;  // gate and up

  static __device__ __forceinline__ LayerShare of(const LayerTask& p, int stage) {
    LayerShare s;
    s.pairs = stage == kLayerGateUp;
    const int units = (s.pairs ? p.width : p.weights[stage].outer) / kPackedRows;
    s.first_unit = units * static_cast<int>(blockIdx.x) / static_cast<int>(gridDim.x);
    s.end_unit = units * (static_cast<int>(blockIdx.x) + 1) / static_cast<int>(gridDim.x);
    s.num_tiles = s.pairs ? s.end_unit - s.first_unit : ceil_div(s.end_unit - s.first_unit, 2);
    s.num_spans = p.weights[stage].inner / kPackedSpan;
    return s;
  }
  // The tile's first row of W, and how many rows below it the second half begins: 0 where there is none.
  __device__ __forceinline__ int row(int tile) const { return (first_unit + tile * (pairs ? 1 : 2)) * kPackedRows; }
  __device__ __forceinline__ int below(const LayerTask& p, int tile) const {
    if (pairs) return p.width;
    return first_unit + tile * 2 + 1 < end_unit ? kPackedRows : 0;
  }
};

// All spans of a warp, of one product after the other, on their way into its ring.
template <typename Block>
struct LayerReader {
  using Format = typename Block::Weight;
  PackedPlace<Format> places[Block::RowTiles];
  int stage, tile, left;  // spans left in the tile

  __device__ __forceinline__ void start(const LayerTask& p) {
    stage = tile = 0;
    find(p);
  }
  // Sets the places to the first span from (stage, tile) on that there is.
  __device__ __forceinline__ void find(const LayerTask& p) {
    const int part = threadIdx.x / 32;
    for (; stage < p.num_stages; ++stage, tile = 0) {
      const LayerShare s = LayerShare::of(p, stage);
      left = s.num_spans > part ? ceil_div(s.num_spans - part, kLayerWarps) : 0;
      if (left == 0 || tile >= s.num_tiles) continue;
      const int row = s.row(tile) + static_cast<int>(threadIdx.x) % 32 / 4;
      places[0].set(p.weights[stage], row, part * kPackedSpan);
      places[1].set(p.weights[stage], row + s.below(p, tile), part * kPackedSpan);
      return;
    }
  }
  __device__ __forceinline__ void copy_next(const LayerTask& p, uint32_t slot) {
    if (stage < p.num_stages) {
      const PackedWeight& w = p.weights[stage];
#pragma unroll
      for (int r = 0; r < Block::RowTiles; ++r) {
        places[r].copy(w, slot + r * Block::SpanBytes);
        places[r].move(w, kLayerWarps * kPackedSpan);
      }
      if (--left == 0) {
        ++tile;
        find(p);
      }
    }
    copy_async_commit();
  }
};

// The columns [first, first + columns) of x in shared memory, and what XNotes has of them.
template <typename Block>
struct LayerX {
  using T = typename Block::Weight::T;
  char* tokens;
  float* squares;  // [rows][kLayerMaxSegments]: where partial sums are later
  XNotes notes;
  int pitch, first, columns, num_rows;

  __device__ __forceinline__ uint4* place(int row, int chunk) const {
    return reinterpret_cast<uint4*>(tokens + row * pitch + chunk * 16);
  }
};

// Which chunks of 8 columns a lane has: those of a warp's units, a unit being a segment of a row.
struct LayerUnits {
  int segments, segment, row;

  __device__ __forceinline__ LayerUnits(int columns) : segments(ceil_div(columns, kLayerSegment)), row(0) {
    segment = threadIdx.x / 32;
    wrap();
  }
  __device__ __forceinline__ void next() {
    segment += kLayerWarps;
    wrap();
  }
  __device__ __forceinline__ void wrap() {
    for (; segment >= segments; segment -= segments) ++row;
  }
  __device__ __forceinline__ int chunk() const { return segment * (kLayerSegment / 8) + threadIdx.x % 32; }
};

// Reads around the L1 cache: other blocks wrote this within the launch.
__device__ __forceinline__ uint4 load_shared_rows(const void* rows, int64_t index, int at) {
  return __ldcg(reinterpret_cast<const uint4*>(static_cast<const char*>(rows) + index * 2) + at);
}

// Keeps kCount chunks, of tokens `rows` at places `at`; those of rows from num_rows on, and from the last column on, not.
template <typename Block, int kCount>
__device__ __forceinline__ void keep_layer_x(const LayerX<Block>& x, uint4 (&values)[kCount], const int (&rows)[kCount],
                                             const int (&at)[kCount]) {
  using Format = typename Block::Weight;
  float factors[kCount], sums[kCount];
  if constexpr (Format::InHalf) halve_chunks<Format>(values, at, factors, sums);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (rows[k] >= x.num_rows || at[k] * 8 >= x.columns) continue;
    char* place = reinterpret_cast<char*>(x.place(rows[k], at[k]));
    if constexpr (Format::InHalf) {
      const XNotes of_token = {x.notes.factors + rows[k], x.notes.sums + rows[k]};
      keep_halves<Format, Block::MaxTokens>(values[k], factors[k], sums[k], place, of_token, at[k]);
    } else {
      *reinterpret_cast<uint4*>(place) = values[k];
    }
  }
}

constexpr int kLayerAtOnce = 8;  // chunks of x that a lane has on their way

// A lane's chunks of kCount units, from `unit` on: which, and their values; zeros past the last row or column.
template <typename Block, int kCount>
struct LayerChunks {
  uint4 values[kCount];
  int rows[kCount], segments[kCount], at[kCount];

  __device__ __forceinline__ void find(LayerUnits& unit) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      rows[k] = unit.row;
      segments[k] = unit.segment;
      at[k] = unit.chunk();
      unit.next();
    }
  }
  __device__ __forceinline__ bool inside(const LayerX<Block>& x, int k) const {
    return rows[k] < x.num_rows && at[k] * 8 < x.columns;
  }
  __device__ __forceinline__ void load(const LayerX<Block>& x, const void* source, int inner) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      values[k] = {};
      if (inside(x, k)) values[k] = load_shared_rows(source, int64_t{rows[k]} * inner + x.first, at[k]);
    }
  }
};

// Calls f with the number of a warp's units that it takes at once, 2 or kLayerAtOnce, until it has had them all.
template <typename F>
__device__ __forceinline__ void for_layer_units(int columns, int num_rows, const F& f) {
  LayerUnits unit(columns);
#pragma unroll 1
  while (unit.row < num_rows) {  // the same in all lanes
    LayerUnits third = unit;
    third.next();
    third.next();
    if (third.row < num_rows) {
      f(unit, std::integral_constant<int, kLayerAtOnce>{});
    } else {
      f(unit, std::integral_constant<int, 2>{});
    }
  }
}

// Brings columns of rows [num_rows, inner]. The warps that multiply.
template <typename Block>
__device__ __forceinline__ void load_layer_x(const LayerX<Block>& x, const void* source, int inner) {
  for_layer_units(x.columns, x.num_rows, [&](LayerUnits& unit, auto count) {
    LayerChunks<Block, count.value> chunks;
    chunks.find(unit);
    chunks.load(x, source, inner);
    keep_layer_x<Block>(x, chunks.values, chunks.rows, chunks.at);
  });
}

// Each of kCount values, over the lanes of a warp.
template <int kCount>
__device__ __forceinline__ void sum_over_warp(float (&values)[kCount]) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) values[k] += __shfl_xor_sync(0xFFFFFFFF, values[k], lanes);
  }
}

template <typename T>
__device__ __forceinline__ void unpack_eight(const uint4& eight, float (&values)[8]) {
  const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 two;
    if constexpr (std::is_same_v<T, __half>) {
      two = __half22float2(reinterpret_cast<const __half2&>(words[i]));
    } else {
      two = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(words[i]));
    }
    values[2 * i] = two.x;
    values[2 * i + 1] = two.y;
  }
}

// Brings whole rows as they are, and the sums of squares of their segments.
template <typename Block>
__device__ __forceinline__ void load_raw_rows(const LayerX<Block>& x, const void* source) {
  for_layer_units(x.columns, x.num_rows, [&](LayerUnits& unit, auto count) {
    constexpr int kCount = count.value;
    LayerChunks<Block, kCount> chunks;
    chunks.find(unit);
    chunks.load(x, source, x.columns);
    float squares[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      float numbers[8];
      unpack_eight<typename LayerX<Block>::T>(chunks.values[k], numbers);
      squares[k] = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) squares[k] = fmaf(numbers[i], numbers[i], squares[k]);
    }
    sum_over_warp(squares);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (chunks.rows[k] >= x.num_rows) continue;
      if (threadIdx.x % 32 == 0) x.squares[chunks.rows[k] * kLayerMaxSegments + chunks.segments[k]] = squares[k];
      if (chunks.inside(x, k)) *x.place(chunks.rows[k], chunks.at[k]) = chunks.values[k];
    }
  });
}

// Norms what load_raw_rows brought, in place, each lane its own chunks. `first_weight`: of the first unit's columns.
template <typename Block>
__device__ __forceinline__ void norm_rows(const LayerTask& p, const LayerX<Block>& x, const void* weight,
                                          const uint4& first_weight) {
  using T = typename LayerX<Block>::T;
  const LayerUnits first(x.columns);
  for_layer_units(x.columns, x.num_rows, [&](LayerUnits& unit, auto count) {
    constexpr int kCount = count.value;
    LayerChunks<Block, kCount> chunks;
    chunks.find(unit);
    float squares[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const int lane = threadIdx.x % 32;
      const bool sums = lane < first.segments && chunks.rows[k] < x.num_rows;
      squares[k] = sums ? x.squares[chunks.rows[k] * kLayerMaxSegments + lane] : 0.0f;
      chunks.values[k] = {};
      if (chunks.inside(x, k)) chunks.values[k] = *x.place(chunks.rows[k], chunks.at[k]);
    }
    sum_over_warp(squares);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      uint4 weights = first_weight;
      if (chunks.segments[k] != first.segment && chunks.inside(x, k)) {
        weights = static_cast<const uint4*>(weight)[chunks.at[k]];
      }
      const float inverse_rms = rsqrtf(squares[k] / x.columns + p.epsilon);
      float numbers[8], factors[8];
      unpack_eight<T>(chunks.values[k], numbers);
      unpack_eight<T>(weights, factors);
#pragma unroll
      for (int i = 0; i < 8; ++i) numbers[i] = numbers[i] * inverse_rms * (factors[i] + p.weight_offset);
      chunks.values[k] = make_uint4(pack2<T>(numbers[0], numbers[1]), pack2<T>(numbers[2], numbers[3]),
                                    pack2<T>(numbers[4], numbers[5]), pack2<T>(numbers[6], numbers[7]));
    }
    keep_layer_x<Block>(x, chunks.values, chunks.rows, chunks.at);
  });
}

// The first unit's part of a norm's weight, which is there before the rows are.
template <typename Block>
__device__ __forceinline__ uint4 first_norm_weight(const void* weight, int columns) {
  const LayerUnits unit(columns);
  const int chunk = unit.chunk();
  if (chunk * 8 >= columns) return {};
  return static_cast<const uint4*>(weight)[chunk];
}

// The columns of a stage's rows from `x.first` on. A function of its own, so that products need no registers for it.
template <typename Block>
__device__ __noinline__ void bring_layer_x(const LayerTask& p, const LayerX<Block>& x, int stage, uint4 first_weight) {
  if (stage == kLayerGateUp || stage == kLayerQkv) {
    load_raw_rows<Block>(x, stage == kLayerGateUp ? p.middle : p.total);
    named_barrier(1, kLayerWarps * 32);
    norm_rows<Block>(p, x, p.norms[stage == kLayerQkv], first_weight);
  } else {
    load_layer_x<Block>(x, stage == kLayerO ? p.x : p.inner, p.weights[stage].inner);
  }
  named_barrier(1, kLayerWarps * 32);
}

// Writes a tile's sums of 8 rows of x from `first_token` on. `residual`: of this thread's output.
template <typename Block>
__device__ __forceinline__ void write_layer_outputs(const LayerTask& p, int stage, const LayerShare& s, int tile,
                                                    int first_token, const float* partials, float residual) {
  using T = typename Block::Weight::T;
  const int floats = Block::partial_floats(p.num_rows);
  const int token = first_token + static_cast<int>(threadIdx.x) / Block::Rows;
  const int column = threadIdx.x % Block::Rows;
  if (token >= p.num_rows || threadIdx.x >= 8 * Block::Rows) return;
  const float* own = partials + (token - first_token) * Block::Pitch + column;
  const auto sum_of = [&](const float* part) {
    float sum = part[0];
#pragma unroll
    for (int w = 1; w < kLayerWarps; ++w) sum += part[w * floats];
    return to_float(from_float<T>(sum));  // as if the product were written
  };
  const int row = s.row(tile) + column;
  if (stage == kLayerGateUp) {
    if (column >= kPackedRows) return;
    const float gate = sum_of(own), up = sum_of(own + kPackedRows);
    static_cast<T*>(p.inner)[int64_t{token} * p.width + row] = from_float<T>(silu<T>(gate) * up);
    return;
  }
  if (row >= s.end_unit * kPackedRows) return;
  const bool adds = stage == kLayerO || (stage == kLayerDown && p.num_stages == kLayerStages);
  T* target = static_cast<T*>(stage == kLayerO ? p.middle : stage == kLayerDown ? p.total : p.y);
  const float sum = sum_of(own);
  target[int64_t{token} * p.weights[stage].outer + row] = from_float<T>(adds ? sum + residual : sum);
}

// What this thread's output of a tile is added to, for write_layer_outputs().
template <typename Block>
__device__ __forceinline__ float load_layer_residual(const LayerTask& p, int stage, const LayerShare& s, int tile,
                                                     int first_token) {
  using T = typename Block::Weight::T;
  const int token = first_token + static_cast<int>(threadIdx.x) / Block::Rows;
  const int row = s.row(tile) + static_cast<int>(threadIdx.x) % Block::Rows;
  const void* source = stage == kLayerO ? p.residual : stage == kLayerDown ? p.middle : nullptr;
  if (source == nullptr || threadIdx.x >= 8 * Block::Rows || token >= p.num_rows || row >= s.end_unit * kPackedRows) {
    return 0.0f;
  }
  const unsigned short bits = __ldcg(static_cast<const unsigned short*>(source) + int64_t{token} * p.hidden + row);
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(__ushort_as_half(bits));
  } else {
    return __bfloat162float(__ushort_as_bfloat16(bits));
  }
}

// Slots of a ring: 2 to 6, 8 or 10.
constexpr int kLayerMaxSlots = 10;
inline int layer_slots(int most) { return most >= kLayerMaxSlots ? kLayerMaxSlots : most <= 6 ? most : most / 2 * 2; }

// Waits for all but `pending` groups of copies: two less than there are slots.
__device__ __forceinline__ void await_layer_copies(int pending) {
  if (pending < 2) {
    if (pending == 0) return copy_async_wait<0>();
    copy_async_wait<1>();
  } else if (pending < 4) {
    if (pending == 2) return copy_async_wait<2>();
    copy_async_wait<3>();
  } else {
    if (pending == 4) return copy_async_wait<4>();
    if (pending == 6) return copy_async_wait<6>();
    copy_async_wait<8>();
  }
}

// A warp's ring, and where it is in it.
template <typename Block>
struct LayerRing {
  const char* slots;
  uint32_t slot, last, end;  // bytes

  __device__ __forceinline__ void next() {
    last = slot;
    slot = slot == end ? 0 : slot + Block::SlotBytes;
  }
};

template <typename Block>
struct LayerWork {
  using Format = typename Block::Weight;
  const LayerTask& p;
  LayerReader<Block>& reader;
  LayerRing<Block>& ring;
  LayerX<Block>& x;
  float* partials;

  // sums += of the spans of x's columns.
  __device__ __forceinline__ void multiply(const PackedWeight& w, uint32_t scale_base,
                                           float (&sums)[Block::RowTiles][Block::Tiles][4]) const {
    constexpr int kTiles = Block::Tiles;
    const int lane = threadIdx.x % 32, part = threadIdx.x / 32, num_spans = x.columns / kPackedSpan;
    uint32_t places[kTiles];  // tokens past the last repeat it; what becomes of them is not kept
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      places[j] = shared_address(x.tokens) + min(j * 8 + lane % 8, x.num_rows - 1) * x.pitch + lane / 8 * 16;
    }
    const float2* lane_sums = reinterpret_cast<const float2*>(x.notes.sums) + lane % 4;
    const float2* lane_factors = reinterpret_cast<const float2*>(x.notes.factors) + lane % 4;
#pragma unroll 1
    for (int span = part; span < num_spans; span += kLayerWarps) {
      await_layer_copies(p.slots - 2);
      __syncwarp();  // the others' copies too; and all have read the slot before, which the next copies fill
      PackedSpan<Format> values[Block::RowTiles];
#pragma unroll
      for (int r = 0; r < Block::RowTiles; ++r) {
        read_span<Format>(w, ring.slots + ring.slot + r * Block::SpanBytes, scale_base, values[r]);
      }
      reader.copy_next(p, shared_address(ring.slots) + ring.last);
      multiply_packed_span<Block>(w, values, span * kPackedSpan * 2, places, lane_factors + span * kTiles * 4,
                                  lane_sums + span * Format::Groups * kTiles * 4, sums);
      ring.next();
    }
  }

  // Adds up the warps' sums of a tile and writes them. All warps that multiply.
  __device__ __forceinline__ void finish(int stage, const LayerShare& s, int tile,
                                         const float (&sums)[Block::RowTiles][Block::Tiles][4],
                                         const float (&residuals)[Block::Tiles]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, floats = Block::partial_floats(p.num_rows);
#pragma unroll
    for (int j = 0; j < Block::Tiles; ++j) {
      if (j * 8 >= p.num_rows) break;
      named_barrier(1, kLayerWarps * 32);  // the last sums have been read
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = lane % 4 * 2 + e % 2;
        if (j * 8 + token >= p.num_rows) continue;
        float* own = partials + warp * floats + token * Block::Pitch + lane / 4 + e / 2 * 8;
#pragma unroll
        for (int r = 0; r < Block::RowTiles; ++r) own[r * kPackedRows] = sums[r][j][e];
      }
      named_barrier(1, kLayerWarps * 32);
      write_layer_outputs<Block>(p, stage, s, tile, j * 8, partials, residuals[j]);
    }
  }

  // One product. The rows of x are there. `first_weight`: see norm_rows().
  __device__ __forceinline__ void run(int stage, const uint4& first_weight) const {
    const LayerShare s = LayerShare::of(p, stage);
    const bool norms = stage == kLayerGateUp || stage == kLayerQkv;
    const int inner = p.weights[stage].inner, most = norms ? inner : p.x_columns;
    // Of the warp's first span: the others' differ by multiples of four spans, which do not count.
    const uint32_t scale_base = scale_index<Format>(p.weights[stage], static_cast<int>(threadIdx.x) / 32 * kPackedSpan);
#pragma unroll 1
    for (int tile = 0; tile < s.num_tiles; ++tile) {
      float sums[Block::RowTiles][Block::Tiles][4] = {};
      float residuals[Block::Tiles];
#pragma unroll
      for (int j = 0; j < Block::Tiles; ++j) residuals[j] = load_layer_residual<Block>(p, stage, s, tile, j * 8);
#pragma unroll 1
      for (int first = 0; first < inner; first += most) {
        if (tile == 0 || most < inner) {
          if (first > 0 || tile > 0) named_barrier(1, kLayerWarps * 32);  // the columns before have been read
          set_columns(first, min(most, inner - first));
          bring_layer_x<Block>(p, x, stage, first_weight);
        }
        with_known_weight<Format>(p.weights[stage],
                                  [&](const PackedWeight& known) { multiply(known, scale_base, sums); });
      }
      finish(stage, s, tile, sums, residuals);
    }
  }

  __device__ __forceinline__ void set_columns(int first, int columns) const {
    x.first = first;
    x.columns = columns;
    x.pitch = Block::pitch(columns);
  }
};

template <typename Block>
__global__ void __launch_bounds__(kLayerThreads, 1) dense_layer_kernel(const __grid_constant__ LayerTask p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) char layer_shared[];
  const int warp = threadIdx.x / 32;
  if (warp == kLayerWarps) {  // it has no copies on their way, for which a release would wait
    wait_for_previous();
#pragma unroll 1
    for (int stage = 1; stage < p.num_stages; ++stage) {
      __syncthreads();
      if (threadIdx.x % 32 == 0) pass_grid_barrier(p.barrier);
      __syncthreads();
    }
    return;
  }
  char* slots = layer_shared + warp * (p.slots * Block::SlotBytes);
  LayerReader<Block> reader;
  reader.start(p);
#pragma unroll 1
  for (int i = 0; i < p.slots - 1; ++i) reader.copy_next(p, shared_address(slots) + i * Block::SlotBytes);
  const uint32_t end = (p.slots - 1) * Block::SlotBytes;
  LayerRing<Block> ring = {slots, 0, end, end};
  float* notes = reinterpret_cast<float*>(layer_shared + Block::ring_bytes(p.slots));
  const int spans = p.x_columns / kPackedSpan;
  float* factors = notes + (Block::Weight::Based ? spans * Block::Weight::Groups * Block::MaxTokens : 0);
  char* tokens = layer_shared + Block::ring_bytes(p.slots) + Block::note_bytes(p.x_columns);
  float* partials = reinterpret_cast<float*>(tokens + p.num_rows * Block::pitch(p.x_columns));
  LayerX<Block> x = {tokens, partials, {factors, notes}, 0, 0, 0, p.num_rows};
  const LayerWork<Block> work = {p, reader, ring, x, partials};
  wait_for_previous();  // a launch whose weights are not prefetch_safe did not come up before it could pass here
#pragma unroll 1
  for (int stage = 0; stage < p.num_stages; ++stage) {
    uint4 first_weight = {};
    if (stage == kLayerGateUp || stage == kLayerQkv) {
      first_weight = first_norm_weight<Block>(p.norms[stage == kLayerQkv], p.weights[stage].inner);
    }
    if (stage > 0) {
      __syncthreads();
      __syncthreads();  // the warp that does not multiply has passed the grid's barrier
    }
    work.run(stage, first_weight);
  }
  copy_async_wait<0>();
#endif
}

// Blocks come up all or none, so that none waits for one that cannot come. With kYes, while the launch before drains.
template <typename Block>
cudaError_t launch_dense_layer_blocks(const LayerTask& p, const Chip& chip, Overlap overlap, int bytes,
                                      cudaStream_t stream) {
  constexpr int kAllShared = 100;  // percent: the L1 cache has nothing to do here
  const auto kernel = dense_layer_kernel<Block>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, chip.shared_bytes);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, kAllShared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(chip.sms);
  config.blockDim = dim3(kLayerThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = overlap == Overlap::kYes ? 2 : 1;
  error = cudaLaunchKernelEx(&config, kernel, p);
  if (error != cudaErrorCooperativeLaunchTooLarge) return error;
  cudaGetLastError();
  return cudaErrorNotSupported;  // a part of the chip's multiprocessors is not this process's
}

// How much of x is in shared memory at a time, and how many slots a ring has: what `rows` need. Rows that are normed are
// there whole; of the others so many columns that rings keep enough on their way.
template <typename Block>
bool cut_layer_memory(const Chip& chip, int most_slots, LayerTask* p) {
  constexpr int kStep = kLayerWarps * kPackedSpan, kEnough = ceil_div(144 * 1024, Block::ring_bytes(1));
  int widest = 0;
  for (int stage = 0; stage < p->num_stages; ++stage) widest = std::max(widest, p->weights[stage].inner);
  const int least = ceil_div(p->hidden, kStep) * kStep;
  for (int columns = ceil_div(widest, kStep) * kStep;; columns -= kStep) {
    p->x_columns = std::max(columns, least);
    const int others = Block::bytes(p->num_rows, p->x_columns, 0);
    p->slots = layer_slots(std::min(most_slots, (chip.shared_bytes - others) / Block::ring_bytes(1)));
    if (p->slots >= std::min(kEnough, most_slots) || columns <= least) return p->slots >= 2;
  }
}

// cudaErrorNotSupported where rows do not fit, or the chip is not Hopper or later. most_slots: of a ring; 0: chosen.
template <typename Format>
cudaError_t launch_dense_layer(LayerTask p, int most_slots, bool prefetch_safe, cudaStream_t stream) {
  Chip chip;
  if (const cudaError_t error = Chip::current(&chip); error != cudaSuccess) return error;
  const int segments = ceil_div(p.hidden, kLayerSegment);
  if (chip.major < 9 || p.num_rows > kLayerMaxRows || segments > kLayerMaxSegments) return cudaErrorNotSupported;
  const Overlap overlap = prefetch_safe ? Overlap::kYes : Overlap::kNo;
  const int slots = most_slots == 0 ? kLayerMaxSlots : most_slots;
  if (p.num_rows <= 8) {
    using Block = LayerBlock<Format, 1>;
    if (!cut_layer_memory<Block>(chip, slots, &p)) return cudaErrorNotSupported;
    return launch_dense_layer_blocks<Block>(p, chip, overlap, Block::bytes(p.num_rows, p.x_columns, p.slots), stream);
  }
  using Block = LayerBlock<Format, 2>;
  if (!cut_layer_memory<Block>(chip, slots, &p)) return cudaErrorNotSupported;
  return launch_dense_layer_blocks<Block>(p, chip, overlap, Block::bytes(p.num_rows, p.x_columns, p.slots), stream);
}

}  // namespace trt_eagle3
