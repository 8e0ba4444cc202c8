// FP8 (e4m3) keys and values of a cache: a byte times its head's scale is the number. Exact in T; written by division,
// rounding to nearest even, and what is larger than 448 becomes 448.
#pragma once

#include <cuda_fp8.h>

#include "common.cuh"

namespace trt_eagle3 {

// Bytes 1 and 3 of four as two of T. The sign stays in place, exponent and mantissa move to where T's exponent ends;
// that is the number but for the difference of the exponents' biases. Works on every chip, subnormal numbers included.
template <typename T>
__device__ __forceinline__ uint32_t fp8_odd_bytes(uint32_t four) {
  if constexpr (std::is_same_v<T, __half>) {
    const uint32_t bits = (four >> 1 & 0x3F803F80u) | (four & 0x80008000u);
    const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&bits), __half2half2(__ushort_as_half(0x5C00)));
    return *reinterpret_cast<const uint32_t*>(&product);  // times 2^8
  } else {
    const uint32_t bits = (four >> 4 & 0x07F007F0u) | (four & 0x80008000u);
    const __nv_bfloat162 product =
        __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits), __bfloat162bfloat162(__ushort_as_bfloat16(0x7B80)));
    return *reinterpret_cast<const uint32_t*>(&product);  // times 2^120
  }
}

// Bytes 0 and 2.
template <typename T>
__device__ __forceinline__ uint32_t fp8_even_bytes(uint32_t four) {
  return fp8_odd_bytes<T>(four << 8);
}

// Eight bytes as eight of T, in order.
template <typename T>
__device__ __forceinline__ uint4 fp8_widened(uint32_t first, uint32_t second) {
  return make_uint4(fp8_odd_bytes<T>(__byte_perm(first, 0, 0x1404)), fp8_odd_bytes<T>(__byte_perm(first, 0, 0x3424)),
                    fp8_odd_bytes<T>(__byte_perm(second, 0, 0x1404)), fp8_odd_bytes<T>(__byte_perm(second, 0, 0x3424)));
}

__device__ __forceinline__ uint32_t fp8_two(float low, float high, float scale) {
  return __nv_cvt_float2_to_fp8x2(make_float2(__fdiv_rn(low, scale), __fdiv_rn(high, scale)), __NV_SATFINITE,
                                  __NV_E4M3);
}

template <typename T>
__device__ __forceinline__ float2 two_floats(uint32_t two) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&two));
  } else {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&two));
  }
}

// Eight of T as eight bytes.
template <typename T>
__device__ __forceinline__ uint2 fp8_narrowed(const uint4& eight, float scale) {
  const float2 a = two_floats<T>(eight.x), b = two_floats<T>(eight.y);
  const float2 c = two_floats<T>(eight.z), d = two_floats<T>(eight.w);
  return make_uint2(fp8_two(a.x, a.y, scale) | fp8_two(b.x, b.y, scale) << 16,
                    fp8_two(c.x, c.y, scale) | fp8_two(d.x, d.y, scale) << 16);
}

// Stores eight of T as the `pack`th eight numbers of a cache.
template <typename T, bool kFp8>
__device__ __forceinline__ void store_eight(void* cache, int64_t pack, const uint4& eight, float scale) {
  if constexpr (kFp8) {
    static_cast<uint2*>(cache)[pack] = fp8_narrowed<T>(eight, scale);
  } else {
    static_cast<uint4*>(cache)[pack] = eight;
  }
}

// What a byte is multiplied with: of keys (kind 0) or values (kind 1) of a KV head; 1 for a cache of T.
template <bool kFp8>
__device__ __forceinline__ float kv_scale(const TreeAttentionParams& p, int kind, int kv_head) {
  if constexpr (kFp8) {
    return __ldg(p.kv_scales + kind * p.num_kv_heads + kv_head);
  } else {
    return 1.0f;
  }
}

}  // namespace trt_eagle3
