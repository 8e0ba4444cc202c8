// FP8 (e4m3) keys and values of a cache: a byte times its head's scale is the number. Bytes are exact in T. A number
// times 1 / scale is rounded to nearest even, and what is larger than 448 becomes 448.
#pragma once

#include <cuda_fp8.h>

#include "common.cuh"

namespace trt_eagle3 {

#if __CUDA_ARCH__ >= 890
constexpr bool kHasFp8Conversion = true;
#else
constexpr bool kHasFp8Conversion = false;
#endif

// Bytes 1 and 3 of four as two of T. The sign stays in place, exponent and mantissa move to where T's exponent ends;
// that is the number but for the difference of the exponents' biases. For chips and types that have no instruction for
// it; subnormal numbers included.
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

// Bytes 0 and 1 of four (half 0), or 2 and 3, as two of T.
template <typename T>
__device__ __forceinline__ uint32_t fp8_pair_of(uint32_t four, int half) {
  if constexpr (kHasFp8Conversion && std::is_same_v<T, __half>) {  // one instruction
    const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(four >> 16 * half), __NV_E4M3);
    return static_cast<uint32_t>(raw.x) | static_cast<uint32_t>(raw.y) << 16;
  } else {
    return fp8_odd_bytes<T>(__byte_perm(four, 0, half == 0 ? 0x1404 : 0x3424));
  }
}

// Eight bytes as eight of T, in order.
template <typename T>
__device__ __forceinline__ uint4 fp8_widened(uint32_t first, uint32_t second) {
  return make_uint4(fp8_pair_of<T>(first, 0), fp8_pair_of<T>(first, 1), fp8_pair_of<T>(second, 0),
                    fp8_pair_of<T>(second, 1));
}

__device__ __forceinline__ uint32_t fp8_two(float2 two, float inverse) {
  return __nv_cvt_float2_to_fp8x2(make_float2(two.x * inverse, two.y * inverse), __NV_SATFINITE, __NV_E4M3);
}

template <typename T>
__device__ __forceinline__ float2 two_floats(uint32_t two) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&two));
  } else {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&two));
  }
}

// Two of T as two float16, exactly but for what is out of its range: that becomes 65504, or loses bits below 2^-14.
template <typename T>
__device__ __forceinline__ uint32_t two_halves(uint32_t two) {
  if constexpr (std::is_same_v<T, __half>) {
    return two;
  } else {
    const float2 values = two_floats<T>(two);
    return pack2<__half>(fminf(fmaxf(values.x, -65504.0f), 65504.0f), fminf(fmaxf(values.y, -65504.0f), 65504.0f));
  }
}

// Eight of T as eight bytes.
template <typename T>
__device__ __forceinline__ uint2 fp8_narrowed(const uint4& eight, float inverse) {
  return make_uint2(fp8_two(two_floats<T>(eight.x), inverse) | fp8_two(two_floats<T>(eight.y), inverse) << 16,
                    fp8_two(two_floats<T>(eight.z), inverse) | fp8_two(two_floats<T>(eight.w), inverse) << 16);
}

// Stores eight of T as the `pack`th eight numbers of a cache.
template <typename T, bool kFp8>
__device__ __forceinline__ void store_eight(void* cache, int64_t pack, const uint4& eight, float scale) {
  if constexpr (kFp8) {
    static_cast<uint2*>(cache)[pack] = fp8_narrowed<T>(eight, __frcp_rn(scale));
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
