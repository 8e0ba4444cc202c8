// NVFP4 weights for the kernels of linear_packed.cuh: e2m1 numbers in INT4's packed order, an e4m3 scale for 16 columns,
// a float32 scale for each row.
//
// Idea: as a half whose exponent and mantissa are e2m1's, a number is its value times 2^-14, exactly; so is its product
// with its scale, a whole multiple of 2^-24 below 1. The rows' scales and 2^14 multiply the sums.
#pragma once

#include "packed_weight.cuh"

namespace trt_eagle3 {

template <typename Element>
struct Nvfp4Weight {
  using T = Element;
  static constexpr int Bits = 4, Pieces = 1, Groups = 1, ScaleWords = 2, RowTiles = 2;
  static constexpr bool InHalf = std::is_same_v<T, __nv_bfloat16>, Based = false, Sixteenths = false;
  struct Scale {
    uint32_t scales[2];  // of eight blocks
    float row;
  };

  // Of the lane's row: lanes 0 and 1 of four copy scales, the others the row's, in place of zero points.
  static __device__ __forceinline__ const char* scale_place(const PackedWeight& w, int row, int column) {
    return threadIdx.x % 4 < 2
               ? static_cast<const char*>(w.scale) + static_cast<int64_t>(row) * w.scale_columns + column / 16
               : reinterpret_cast<const char*>(w.zero) + static_cast<int64_t>(row) * sizeof(float);
  }
  static __device__ __forceinline__ int scale_bytes(const PackedWeight&, int columns) {
    return threadIdx.x % 4 < 2 ? columns / 16 : 0;
  }
  static __device__ __forceinline__ int scale_row_bytes(const PackedWeight& w, int rows) {
    return rows * (threadIdx.x % 4 < 2 ? w.scale_columns : static_cast<int>(sizeof(float)));
  }
  static __device__ __forceinline__ Scale scale_of(const PackedWeight&, uint32_t first, uint32_t second, uint32_t row,
                                                   uint32_t) {
    return {{first, second}, __uint_as_float(row) * 16384.0f};
  }
  static __device__ __forceinline__ float scale(const PackedWeight&, const Scale& s, int) { return s.row; }
  static __device__ __forceinline__ bool constant(const PackedWeight&) { return true; }
  static __device__ __forceinline__ float zero_of(const Scale&, int) { return 0.0f; }

  // Number `at` (0 to 3) of both halves of a word, times `scale`.
  static __device__ __forceinline__ uint32_t pair(uint32_t word, int at, uint32_t scale) {
    const uint32_t top = word << (12 - 4 * at);
    const uint32_t bits = (top & 0x80008000) | (top >> 3 & 0x0E000E00);
    const __half2 value = __hmul2(reinterpret_cast<const __half2&>(bits), reinterpret_cast<const __half2&>(scale));
    return reinterpret_cast<const uint32_t&>(value);
  }
  static __device__ __forceinline__ uint32_t scale_pair(const Scale& s, int block) {
    return fp8_pair<__half>(__byte_perm(s.scales[block / 4], 0, 0x11 * (block % 4)));
  }
  static __device__ __forceinline__ void quick_operand(const PackedSpan<Nvfp4Weight>& span, int block,
                                                       uint32_t (&a)[4]) {
    const uint32_t low = word_of(span.low[0], block / 2), high = word_of(span.high[0], block / 2);
    const uint32_t low_scale = scale_pair(span.low_scale, block), high_scale = scale_pair(span.high_scale, block);
    const int at = block % 2 * 2;
    a[0] = pair(low, at, low_scale);
    a[1] = pair(high, at, high_scale);
    a[2] = pair(low, at + 1, low_scale);
    a[3] = pair(high, at + 1, high_scale);
  }
  static __device__ __forceinline__ void operand(const PackedSpan<Nvfp4Weight>& span, int block, uint32_t (&a)[4]) {
    quick_operand(span, block, a);
    if constexpr (!std::is_same_v<T, __half>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 values = __half22float2(reinterpret_cast<const __half2&>(a[i]));
        a[i] = pack2<T>(values.x, values.y);
      }
    }
  }
};

}  // namespace trt_eagle3
