// Rows of bfloat16 as half, for products with quantised weights: there a number costs fewer instructions, and x times a
// power of two for each row and 128 columns loses nothing that counts.
#pragma once

#include "packed_weight.cuh"

namespace trt_eagle3 {

// What is kept of x beside it, of [spans or groups][tokens]: where it lies as half, the factors that it was divided by;
// where numbers come with a base, what the bases add to a product (x), and the sum of x (y), which a zero point takes.
struct XNotes {
  float* factors;
  float2* sums;
};

// Sum of `value` of kLanes lanes (2 to 16) that stand side by side.
template <int kLanes>
__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(0xFFFFu << (threadIdx.x & 16), value, lanes);
  }
  return value;
}
__device__ __forceinline__ float span_max(float value) {
#pragma unroll
  for (int lanes = 8; lanes > 0; lanes /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xFFFFu << (threadIdx.x & 16), value, lanes));
  }
  return value;
}

// Keeps 8 columns of x: as half, times the power of two that brings the largest of the token's 128 columns to 2^14. The
// sixteen lanes that have those come together. `notes`: of this token, of the block's first span and group.
template <typename Format, int kTokens>
__device__ __forceinline__ void keep_in_half(const uint4& v, char* place, const XNotes& notes, int chunk) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  float values[8], most = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = __uint_as_float(words[i] << 16);
    values[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000);
    most = fmaxf(most, fmaxf(fabsf(values[2 * i]), fabsf(values[2 * i + 1])));
  }
  const uint32_t exponent = max(__float_as_uint(span_max(most)) >> 23, 15u);
  const float factor = __uint_as_float((268 - exponent) << 23);  // 2^(14 - the largest's exponent)
  if (chunk % 16 == 0) notes.factors[chunk / 16 * kTokens] = __uint_as_float((exponent - 14) << 23);
  const bool sixteenths = Format::Sixteenths && chunk % 2 == 1;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[i] *= factor;
    sum += values[i];
    if (sixteenths) values[i] *= 0.0625f;
  }
  *reinterpret_cast<uint4*>(place) =
      make_uint4(pack2<__half>(values[0], values[1]), pack2<__half>(values[2], values[3]),
                 pack2<__half>(values[4], values[5]), pack2<__half>(values[6], values[7]));
  if constexpr (Format::Based) {
    constexpr int kLanes = 16 / Format::Groups;
    const float base = lanes_sum<kLanes>(sum * (sixteenths ? 64.0f : 1024.0f)), whole = lanes_sum<kLanes>(sum);
    if (chunk % kLanes == 0) notes.sums[chunk / kLanes * kTokens] = make_float2(base, whole);
  }
}

}  // namespace trt_eagle3
