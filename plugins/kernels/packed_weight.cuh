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

// 16 rows by 128 columns, in the registers of a warp.
template <typename Format>
struct PackedSpan {
  uint4 low[Format::Pieces], high[Format::Pieces];  // of rows g and g + 8
  typename Format::Scale low_scale, high_scale;
};

// Where a lane finds a span: rows `row` and row + 8, columns from `column` on. It moves along the rows.
template <typename Format>
struct PackedPlace {
  const char *data, *low_scale, *high_scale;
  int high;  // bytes from the first row to the second

  __device__ __forceinline__ void set(const PackedWeight& w, int row, int column) {
    const int row_bytes = w.inner * Format::Bits / 8;
    data = w.data + static_cast<int64_t>(row) * row_bytes + column * Format::Bits / 8 + threadIdx.x % 4 * 16;
    high = 8 * row_bytes;
    low_scale = Format::scale_place(w, row, column);
    high_scale = Format::scale_place(w, row + 8, column);
  }
  __device__ __forceinline__ void move(const PackedWeight& w, int columns) {
    data += columns * Format::Bits / 8;
    low_scale += Format::scale_bytes(w, columns);
    high_scale += Format::scale_bytes(w, columns);
  }
  __device__ __forceinline__ void load(const PackedWeight& w, PackedSpan<Format>& span) const {
#pragma unroll
    for (int i = 0; i < Format::Pieces; ++i) {
      span.low[i] = load_once(data + i * 64);
      span.high[i] = load_once(data + high + i * 64);
    }
    span.low_scale = Format::load_scale(w, low_scale);
    span.high_scale = Format::load_scale(w, high_scale);
  }
};

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

// e4m3, a float32 scale of a row, of 128 rows or of all, for 128 columns or for all.
template <typename Element>
struct Fp8Weight {
  using T = Element;
  static constexpr int Bits = 8, Pieces = 2, Groups = 1, Ahead = 4, WideAhead = 3;
  using Scale = float;

  static __device__ __forceinline__ const char* scale_place(const PackedWeight& w, int row, int column) {
    const int64_t first = static_cast<int64_t>(row >> w.scale_row_shift) * w.scale_columns;
    const float* scales = static_cast<const float*>(w.scale);
    return reinterpret_cast<const char*>(scales + first + (w.scale_columns == 1 ? 0 : column / kPackedSpan));
  }
  static __device__ __forceinline__ int scale_bytes(const PackedWeight& w, int columns) {
    return w.scale_columns == 1 ? 0 : columns / (kPackedSpan / 4);
  }
  static __device__ __forceinline__ Scale load_scale(const PackedWeight&, const char* place) {
    return __ldg(reinterpret_cast<const float*>(place));
  }
  static __device__ __forceinline__ float scale(const PackedWeight&, const Scale& s, int) { return s; }
  // Whether one scale serves a row's whole length.
  static __device__ __forceinline__ bool constant(const PackedWeight& w) { return w.scale_columns == 1; }

  // A of columns 16 block to 16 block + 15.
  static __device__ __forceinline__ void operand(const PackedSpan<Fp8Weight>& span, int block, uint32_t (&a)[4]) {
    const uint32_t low = word_of(span.low[block / 4], block % 4), high = word_of(span.high[block / 4], block % 4);
    a[0] = fp8_pair<T>(low & 0xFFFF);
    a[1] = fp8_pair<T>(high & 0xFFFF);
    a[2] = fp8_pair<T>(low >> 16);
    a[3] = fp8_pair<T>(high >> 16);
  }
};

// Unsigned codes of four bits; value = (code - zero point) * scale, with 16-bit scales for every 128 / kGroups columns
// of a row, and 8-bit zero points, or 8 for all.
template <typename Element, int kGroups>
struct Int4Weight {
  using T = Element;
  static constexpr int Bits = 4, Pieces = 1, Groups = kGroups, Ahead = kGroups == 4 ? 4 : 6, WideAhead = 4;
  static constexpr uint32_t kBase = std::is_same_v<T, __half> ? 0x6400 : 0x4300;  // 1024 or 128: its last bits are ones
  struct Scale {
    uint32_t scales[kGroups == 4 ? 2 : 1];
    uint32_t zeros;
  };

  static __device__ __forceinline__ const char* scale_place(const PackedWeight& w, int row, int column) {
    const int64_t place = static_cast<int64_t>(row) * w.scale_columns + column / (kPackedSpan / kGroups);
    return static_cast<const char*>(w.scale) + place * 2;
  }
  static __device__ __forceinline__ int scale_bytes(const PackedWeight&, int columns) {
    return columns * 2 * kGroups / kPackedSpan;
  }
  static __device__ __forceinline__ Scale load_scale(const PackedWeight& w, const char* place) {
    Scale s = {};
    const auto scales = loaded<2 * kGroups>(place);
    s.scales[0] = static_cast<uint32_t>(scales);
    if constexpr (kGroups == 4) s.scales[1] = static_cast<uint32_t>(scales >> 32);
    s.zeros = 0x08080808;
    if (w.zero != nullptr) {  // as many bytes from their start as half the scales' from theirs
      s.zeros = static_cast<uint32_t>(loaded<kGroups>(w.zero + (place - static_cast<const char*>(w.scale)) / 2));
    }
    return s;
  }
  template <int kBytes>
  static __device__ __forceinline__ uint64_t loaded(const void* place) {
    if constexpr (kBytes == 1) return __ldg(static_cast<const uint8_t*>(place));
    if constexpr (kBytes == 2) return __ldg(static_cast<const uint16_t*>(place));
    if constexpr (kBytes == 4) return __ldg(static_cast<const uint32_t*>(place));
    return __ldg(static_cast<const unsigned long long*>(place));
  }
  static __device__ __forceinline__ float scale(const PackedWeight& w, const Scale& s, int group) {
    const uint32_t bits = s.scales[group / 2] >> group % 2 * 16 & 0xFFFF;
    return w.scale_bfloat16 ? __uint_as_float(bits << 16)
                            : __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
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
    uint32_t based;  // (word & 0x000F000F) | base, in one instruction: its constants in registers
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;\n"
        : "=r"(based)
        : "r"(word >> shift), "r"(0x000F000F), "r"(kBase | kBase << 16));
    if constexpr (std::is_same_v<T, __half>) {
      const __half2 value = __hsub2(reinterpret_cast<const __half2&>(based), reinterpret_cast<const __half2&>(offset));
      return reinterpret_cast<const uint32_t&>(value);
    } else {
      const __nv_bfloat162 value =
          __hsub2(reinterpret_cast<const __nv_bfloat162&>(based), reinterpret_cast<const __nv_bfloat162&>(offset));
      return reinterpret_cast<const uint32_t&>(value);
    }
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
