// Rows of bfloat16 as half, for products with quantised weights: there a number costs fewer instructions, and x times a
// power of two for each row and 128 columns loses nothing that counts.
#pragma once

#include "packed_weight.cuh"

namespace trt_eagle3 {

// What is kept of x beside it, of [spans or groups][tokens]: where it lies as half, the factors that its products are to
// be multiplied by; where codes have a zero point, the sum of x in the unit of the codes, which a zero point takes.
struct XNotes {
  float* factors;
  float* sums;
};

constexpr int kChunksOfSpan = kPackedSpan / 8;  // of 8 columns
template <typename Format>
constexpr int kChunksOfGroup = kChunksOfSpan / Format::Groups;

// Makes halves of 8 columns each of kCount rows, chunks `chunks` of 8: times the power of two that brings the largest of
// the row's 128 columns to 2^14. A warp comes together, and sixteen lanes that stand side by side have those columns;
// what comes of kCount chunks at once does not wait for one another's shuffles. factors, sums: as XNotes has them, in
// the lanes of a span's, or group's, columns.
template <typename Format, int kCount>
__device__ __forceinline__ void halve_chunks(uint4 (&x)[kCount], const int (&chunks)[kCount],
                                             float (&factors)[kCount], float (&sums)[kCount]) {
  constexpr uint32_t kUnit = Format::Based ? kCodeUnitBits : 0;  // numbers from 2^(141 - kUnit) on become infinite
  float values[kCount][8], most[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const uint32_t words[4] = {x[k].x, x[k].y, x[k].z, x[k].w};
    most[k] = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[k][2 * i] = __uint_as_float(words[i] << 16);
      values[k][2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000);
      most[k] = fmaxf(most[k], fmaxf(fabsf(values[k][2 * i]), fabsf(values[k][2 * i + 1])));
    }
  }
#pragma unroll
  for (int lanes = 8; lanes > 0; lanes /= 2) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) most[k] = fmaxf(most[k], __shfl_xor_sync(0xFFFFFFFF, most[k], lanes));
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const uint32_t exponent = min(max(__float_as_uint(most[k]) >> 23, 15u), 268 - kUnit);
    const float factor = __uint_as_float((268 - exponent) << 23);  // 2^(14 - the largest's exponent)
    factors[k] = __uint_as_float((exponent + kUnit - 14) << 23);
    const bool sixteenths = Format::Sixteenths && chunks[k] % 2 == 1;
    sums[k] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[k][i] *= factor;
      sums[k] += values[k][i];
      if (sixteenths) values[k][i] *= 0.0625f;
    }
    x[k] = make_uint4(pack2<__half>(values[k][0], values[k][1]), pack2<__half>(values[k][2], values[k][3]),
                      pack2<__half>(values[k][4], values[k][5]), pack2<__half>(values[k][6], values[k][7]));
  }
  if constexpr (Format::Based) {
#pragma unroll
    for (int lanes = kChunksOfGroup<Format> / 2; lanes > 0; lanes /= 2) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) sums[k] += __shfl_xor_sync(0xFFFFFFFF, sums[k], lanes);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) sums[k] *= kCodeUnit;
  }
}

// Keeps what halve_chunks made of a chunk. `notes`: of its row, of the block's first span and group.
template <typename Format, int kTokens>
__device__ __forceinline__ void keep_halves(const uint4& halves, float factor, float sum, char* place,
                                            const XNotes& notes, int chunk) {
  *reinterpret_cast<uint4*>(place) = halves;
  if (chunk % kChunksOfSpan == 0) notes.factors[chunk / kChunksOfSpan * kTokens] = factor;
  if constexpr (Format::Based) {
    constexpr int kChunks = kChunksOfGroup<Format>;
    if (chunk % kChunks == 0) notes.sums[chunk / kChunks * kTokens] = sum;
  }
}

}  // namespace trt_eagle3
