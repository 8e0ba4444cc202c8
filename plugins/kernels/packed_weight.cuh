// Quantised weights as operands of the tensor cores: the policy Format of linear_packed.cuh and linear_packed_wide.cuh.
//
// Columns of K lie in the order in which lanes want them, so that the 16 bytes that a lane loads are whole operands of
// m16n8k16 products (and of wgmma, whose A is the same): lane t of four has, of each 16 columns, 2t, 2t + 1, 2t + 8 and
// 2t + 9.
//   FP8 (e4m3): of every 64 columns, 16 bytes a lane, four for each 16 columns.
//   INT4: of every 128 columns, 16 bytes a lane, a word for each 32 columns; its nibbles 0 and 4, 1 and 5 are the pairs
//   of the first 16, its nibbles 2 and 6, 3 and 7 those of the others. So one mask and one or make a pair of numbers.
// trt_eagle3/engine/torch/packing.py writes that order. Numbers are exact in T; scales multiply sums, in float32.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "common.cuh"

namespace trt_eagle3 {

constexpr int kPackedSpan = 128;  // columns that a warp loads at once, of 16 rows
constexpr int kPackedBlocks = 8;  // products 16 deep in it
constexpr int kPackedRows = 16;   // rows g and g + 8 are lane 4g + t's

// The bits of a code, as those of a half, are the code times this: a subnormal number, which products take as it is.
constexpr int kCodeUnitBits = 24;
constexpr float kCodeUnit = 1.0f / (1 << kCodeUnitBits);

// A quantised weight in memory.
//   scale: [scale_rows, scale_columns]. zero: [N, K / group] or null.
struct PackedWeight {
  const char* data;
  const void* scale;
  const uint8_t* zero;
  int32_t inner, outer;
  int32_t scale_columns;    // FP8: 1, or K / 128; INT4: K / group
  int32_t scale_row_shift;  // FP8: row n has scales n >> shift
  int32_t scale_bfloat16;   // INT4: else float16
};

// Copies 4 bytes to shared memory, through the L1 cache.
__device__ __forceinline__ void copy_async4(uint32_t destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(destination), "l"(source) : "memory");
}

// 16 rows by 128 columns, in the registers of a warp.
template <typename Format>
struct PackedSpan {
  uint4 low[Format::Pieces], high[Format::Pieces];  // of rows g and g + 8
  typename Format::Scale low_scale, high_scale;
};

// A warp's slot of a ring in shared memory: a span, of which every lane reads the weights that it copied itself; behind
// them the words that hold the scales of rows g and g + 8 and their zero points, which lanes 4g to 4g + 3 copied.
template <typename Format>
constexpr int kPackedSlotBytes = Format::Pieces * 1024 + Format::ScaleWords * 128;

// Where a lane finds a span: rows `row` and row + high_rows (a multiple of 8), columns from `column` on. It moves along
// the rows.
template <typename Format>
struct PackedPlace {
  const char *data, *scale;
  uint32_t high;  // bytes from the first row to the second
  bool scales;    // whether this lane copies any

  __device__ __forceinline__ void set(const PackedWeight& w, int row, int column, int high_rows = 8) {
    const int row_bytes = w.inner * Format::Bits / 8;
    data = w.data + static_cast<int64_t>(row) * row_bytes + column * Format::Bits / 8 + threadIdx.x % 4 * 16;
    high = high_rows * row_bytes;
    scale = Format::scale_place(w, row + threadIdx.x % 2 * high_rows, column);
    scales = threadIdx.x % 4 < (w.zero == nullptr ? 2 : 4);
  }
  __device__ __forceinline__ void move(const PackedWeight& w, int columns) {
    data += columns * Format::Bits / 8;
    scale += Format::scale_bytes(w, columns);
  }
  // Starts this lane's copies of a span into a slot.
  __device__ __forceinline__ void copy(const PackedWeight& w, uint32_t slot) const {
    const uint32_t lane = threadIdx.x % 32, pieces = slot + lane * 16;
#pragma unroll
    for (int i = 0; i < Format::Pieces; ++i) {
      copy_async16(pieces + i * 1024, data + i * 64, 16);
      copy_async16(pieces + i * 1024 + 512, data + high + i * 64, 16);
    }
    if (!scales) return;
    const uintptr_t word = reinterpret_cast<uintptr_t>(scale) & ~uintptr_t{3};
#pragma unroll
    for (int i = 0; i < Format::ScaleWords; ++i) {
      if (i > 0 && lane % 4 >= 2) break;  // the zero points of a span are one word
      copy_async4(slot + Format::Pieces * 1024 + i * 128 + lane * 4, reinterpret_cast<const char*>(word) + i * 4);
    }
  }
};

// The place of the first scale of a span in memory, but for multiples of 8 rows.
template <typename Format>
__device__ __forceinline__ uint32_t scale_index(const PackedWeight& w, int column) {
  return threadIdx.x % 32 / 4 * w.scale_columns + column / kPackedSpan * Format::Groups;
}

// What the warp's copies left in a slot; they are complete, and a __syncwarp() is between.
template <typename Format>
__device__ __forceinline__ void read_span(const PackedWeight& w, const char* slot, uint32_t index,
                                          PackedSpan<Format>& span) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < Format::Pieces; ++i) {
    span.low[i] = *reinterpret_cast<const uint4*>(slot + lane * 16 + i * 1024);
    span.high[i] = *reinterpret_cast<const uint4*>(slot + lane * 16 + i * 1024 + 512);
  }
  if constexpr (Format::ScaleWords > 0) {
    const char* scales = slot + Format::Pieces * 1024 + lane / 4 * 16;
    const uint4 words = *reinterpret_cast<const uint4*>(scales);
    uint2 more = {};
    if constexpr (Format::ScaleWords > 1) more = *reinterpret_cast<const uint2*>(scales + 128);
    span.low_scale = Format::scale_of(w, words.x, more.x, words.z, index);
    span.high_scale = Format::scale_of(w, words.y, more.y, words.w, index);
  }
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Two e4m3 values as two of T, exactly.
template <typename T>
__device__ __forceinline__ uint32_t fp8_pair(uint32_t two) {
  const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
  if constexpr (std::is_same_v<T, __half>) {
    return static_cast<uint32_t>(raw.x) | static_cast<uint32_t>(raw.y) << 16;
  } else {
    const float2 values = __half22float2(__half2(raw));
    return pack2<T>(values.x, values.y);
  }
}

// Numbers of a byte; a float32 scale of a row, of 128 rows or of all, for 128 columns or for all.
template <typename Element>
struct ByteWeight {
  using T = Element;
  static constexpr int Bits = 8, Pieces = 2, Groups = 1, ScaleWords = 1, RowTiles = 1;
  using Scale = float;

  static __device__ __forceinline__ const char* scale_place(const PackedWeight& w, int row, int column) {
    const int64_t first = static_cast<int64_t>(row >> w.scale_row_shift) * w.scale_columns;
    const float* scales = static_cast<const float*>(w.scale);
    return reinterpret_cast<const char*>(scales + first + (w.scale_columns == 1 ? 0 : column / kPackedSpan));
  }
  static __device__ __forceinline__ int scale_bytes(const PackedWeight& w, int columns) {
    return w.scale_columns == 1 ? 0 : columns / (kPackedSpan / 4);
  }
  static __device__ __forceinline__ Scale scale_of(const PackedWeight&, uint32_t word, uint32_t, uint32_t, uint32_t) {
    return __uint_as_float(word);
  }
  static __device__ __forceinline__ float scale(const PackedWeight&, const Scale& s, int) { return s; }
  // Whether one scale serves a row's whole length.
  static __device__ __forceinline__ bool constant(const PackedWeight& w) { return w.scale_columns == 1; }

  // For few tokens (linear_packed.cuh): bfloat16's products are computed in half. There a number costs fewer
  // instructions, and x times a power of two for each token and 128 columns loses nothing that counts. Based: numbers are
  // codes in their unit, whose zero points are taken off by sums of x.
  static constexpr bool InHalf = std::is_same_v<T, __nv_bfloat16>;
  static __device__ __forceinline__ float zero_of(const Scale&, int) { return 128.0f; }
};

// e4m3.
template <typename Element>
struct Fp8Weight : ByteWeight<Element> {
  using T = Element;

  static constexpr bool Based = false, Sixteenths = false;
  static __device__ __forceinline__ void quick_operand(const PackedSpan<Fp8Weight>& span, int block, uint32_t (&a)[4]) {
    const uint32_t low = word_of(span.low[block / 4], block % 4), high = word_of(span.high[block / 4], block % 4);
    a[0] = fp8_pair<__half>(low & 0xFFFF);
    a[1] = fp8_pair<__half>(high & 0xFFFF);
    a[2] = fp8_pair<__half>(low >> 16);
    a[3] = fp8_pair<__half>(high >> 16);
  }

  // A of columns 16 block to 16 block + 15.
  static __device__ __forceinline__ void operand(const PackedSpan<Fp8Weight>& span, int block, uint32_t (&a)[4]) {
    const uint32_t low = word_of(span.low[block / 4], block % 4), high = word_of(span.high[block / 4], block % 4);
    a[0] = fp8_pair<T>(low & 0xFFFF);
    a[1] = fp8_pair<T>(high & 0xFFFF);
    a[2] = fp8_pair<T>(low >> 16);
    a[3] = fp8_pair<T>(high >> 16);
  }
};

// Unsigned codes of eight bits; value = (code - 128) * scale.
template <typename Element>
struct Int8Weight : ByteWeight<Element> {
  using T = Element;
  static constexpr bool Based = ByteWeight<Element>::InHalf, Sixteenths = false;

  // Bytes `at` and at + 1 of a word, as the last bits of floats, or of halves.
  static __device__ __forceinline__ uint32_t pair(uint32_t word, int at) {
    if constexpr (std::is_same_v<T, __half>) {
      const uint32_t based = __byte_perm(word, 0x64646464, at == 0 ? 0x4140 : 0x4342);
      const __half2 value = __hsub2(reinterpret_cast<const __half2&>(based), __half2half2(__ushort_as_half(0x6480)));
      return reinterpret_cast<const uint32_t&>(value);
    } else {
      const float low = __uint_as_float(__byte_perm(word, 0x4B000000, 0x7440 | at));
      const float high = __uint_as_float(__byte_perm(word, 0x4B000000, 0x7440 | (at + 1)));
      return pack2<T>(low - 8388736.0f, high - 8388736.0f);
    }
  }
  static __device__ __forceinline__ void operand(const PackedSpan<Int8Weight>& span, int block, uint32_t (&a)[4]) {
    const uint32_t low = word_of(span.low[block / 4], block % 4), high = word_of(span.high[block / 4], block % 4);
    a[0] = pair(low, 0);
    a[1] = pair(high, 0);
    a[2] = pair(low, 2);
    a[3] = pair(high, 2);
  }
  static __device__ __forceinline__ void quick_operand(const PackedSpan<Int8Weight>& span, int block,
                                                       uint32_t (&a)[4]) {
    if constexpr (!Based) return operand(span, block, a);
    const uint32_t low = word_of(span.low[block / 4], block % 4), high = word_of(span.high[block / 4], block % 4);
    a[0] = __byte_perm(low, 0, 0x4140);  // codes in their unit
    a[1] = __byte_perm(high, 0, 0x4140);
    a[2] = __byte_perm(low, 0, 0x4342);
    a[3] = __byte_perm(high, 0, 0x4342);
  }
};

// Unsigned codes of four bits; value = (code - zero point) * scale, with 16-bit scales for every 128 / kGroups columns
// of a row, and 8-bit zero points, or 8 for all.
template <typename Element, int kGroups>
struct Int4Weight {
  using T = Element;
  static constexpr int Bits = 4, Pieces = 1, Groups = kGroups, ScaleWords = kGroups == 4 ? 2 : 1, RowTiles = 2;
  static constexpr uint32_t kBase = std::is_same_v<T, __half> ? 0x6400 : 0x4300;  // 1024 or 128: its last bits are ones
  struct Scale {
    uint32_t scales[kGroups == 4 ? 2 : 1];  // of two groups each, or of one: in the upper half
    uint32_t zeros;
  };

  // Of the lane's row: lanes 0 and 1 of four copy scales, the others zero points, half as many bytes.
  static __device__ __forceinline__ const char* scale_place(const PackedWeight& w, int row, int column) {
    const int64_t place = static_cast<int64_t>(row) * w.scale_columns + column / (kPackedSpan / kGroups);
    return threadIdx.x % 4 < 2 ? static_cast<const char*>(w.scale) + place * 2
                               : reinterpret_cast<const char*>(w.zero) + place;
  }
  static __device__ __forceinline__ int scale_bytes(const PackedWeight&, int columns) {
    return columns * kGroups / kPackedSpan << (threadIdx.x % 4 < 2);
  }
  static __device__ __forceinline__ int scale_row_bytes(const PackedWeight& w, int rows) {
    return rows * w.scale_columns << (threadIdx.x % 4 < 2);
  }
  static __device__ __forceinline__ Scale scale_of(const PackedWeight& w, uint32_t scales, uint32_t more,
                                                   uint32_t zeros, uint32_t index) {
    Scale s;
    s.scales[0] = kGroups == 1 ? __byte_perm(scales, 0, index % 2 == 0 ? 0x1044 : 0x3244) : scales;
    if constexpr (kGroups == 4) s.scales[1] = more;
    s.zeros = w.zero == nullptr ? 0x08080808 : zeros >> index % 4 * 8;
    return s;
  }
  static __device__ __forceinline__ float scale(const PackedWeight& w, const Scale& s, int group) {
    const uint32_t word = s.scales[group / 2];
    const uint32_t bits = kGroups == 1 ? word : group % 2 == 0 ? word << 16 : word & 0xFFFF0000;
    return w.scale_bfloat16 ? __uint_as_float(bits)
                            : __half2float(__ushort_as_half(static_cast<unsigned short>(bits >> 16)));
  }
  static __device__ __forceinline__ bool constant(const PackedWeight& w) {
    return w.scale_columns == 1 && kGroups == 1;
  }

  // Base and zero point, twice: what is to be taken off a pair.
  static __device__ __forceinline__ uint32_t offset(const Scale& s, int group) {
    const uint32_t one = kBase + (s.zeros >> group * 8 & 0xFF);
    return one | one << 16;
  }
  static __device__ __forceinline__ uint32_t pair(uint32_t word, int shift, uint32_t offset) {
    const uint32_t numbers = based(word, shift);
    if constexpr (std::is_same_v<T, __half>) {
      const __half2 value =
          __hsub2(reinterpret_cast<const __half2&>(numbers), reinterpret_cast<const __half2&>(offset));
      return reinterpret_cast<const uint32_t&>(value);
    } else {
      const __nv_bfloat162 value =
          __hsub2(reinterpret_cast<const __nv_bfloat162&>(numbers), reinterpret_cast<const __nv_bfloat162&>(offset));
      return reinterpret_cast<const uint32_t&>(value);
    }
  }

  // For few tokens, as ByteWeight's. Pairs of codes in their unit, half of them of sixteen times the codes: x of those
  // columns comes divided by that.
  static constexpr bool InHalf = std::is_same_v<T, __nv_bfloat16>, Based = InHalf, Sixteenths = InHalf;
  static __device__ __forceinline__ void quick_operand(const PackedSpan<Int4Weight>& span, int block,
                                                       uint32_t (&a)[4]) {
    if constexpr (!Based) return operand(span, block, a);
    const int shift = block % 2 * 8;
    const uint32_t low = word_of(span.low[0], block / 2) >> shift, high = word_of(span.high[0], block / 2) >> shift;
    a[0] = low & 0x000F000F;
    a[1] = high & 0x000F000F;
    a[2] = low & 0x00F000F0;
    a[3] = high & 0x00F000F0;
  }
  static __device__ __forceinline__ float zero_of(const Scale& s, int group) {
    return __uint_as_float(0x4B000000 | (s.zeros >> group * 8 & 0xFF)) - 8388608.0f;
  }
  static __device__ __forceinline__ uint32_t based(uint32_t word, int shift) {
    uint32_t pair;  // (word & 0x000F000F) | base, in one instruction: its constants in registers
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;\n"
        : "=r"(pair)
        : "r"(word >> shift), "r"(0x000F000F), "r"(kBase | kBase << 16));
    return pair;
  }

  static __device__ __forceinline__ void operand(const PackedSpan<Int4Weight>& span, int block, uint32_t (&a)[4]) {
    const uint32_t low = word_of(span.low[0], block / 2), high = word_of(span.high[0], block / 2);
    const int group = block / (kPackedBlocks / kGroups), shift = block % 2 * 8;
    const uint32_t low_offset = offset(span.low_scale, group), high_offset = offset(span.high_scale, group);
    a[0] = pair(low, shift, low_offset);
    a[1] = pair(high, shift, high_offset);
    a[2] = pair(low, shift + 4, low_offset);
    a[3] = pair(high, shift + 4, high_offset);
  }
};

}  // namespace trt_eagle3
