// Rows of x as e4m3 and scales, for stock FP8 products: scale = largest |x| / 448, of a row or of each 128 columns of
// it, and x times 448 / largest rounded once, in packed_weight.cuh's order of columns. Or the values that those stand
// for, as T, for products with few rows. x is read once, and kept in registers unless it is very wide. Bytes moved: x,
// and half of that or as much written.
#include <cuda_fp8.h>

#include "common.cuh"

namespace trt_eagle3 {
namespace {

constexpr int kQuantiseThreads = 256;
constexpr float kLargestE4m3 = 448.0f;
constexpr float kSmallest = 1e-30f;  // what is smaller counts as 0: its factor may be infinite

constexpr int kMostPacks = 6;  // eight values each that a thread keeps between the two times it wants them

template <typename T>
__device__ __forceinline__ void unpack_eight(const Pack<T, 8>& pack, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = to_float(pack.values[i]);
}

__device__ __forceinline__ float largest(const float (&values)[8]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(values[i]));
  return most;
}

__device__ __forceinline__ float scale_of(float most) { return most > kSmallest ? most / kLargestE4m3 : 1.0f; }
__device__ __forceinline__ float factor_of(float most) { return most > kSmallest ? kLargestE4m3 / most : 1.0f; }

__device__ __forceinline__ uint32_t two_pairs(const float* v, float factor) {
  const float2 low = make_float2(v[0] * factor, v[1] * factor), high = make_float2(v[2] * factor, v[3] * factor);
  return __nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3) |
         static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3)) << 16;
}

// Codes of 8 columns, pairs 0 and 1 in x and 2 and 3 in y. Of each 64 columns eight lanes have them; each stores 8
// bytes of the packed order: what pair t of both halves of two times 16 columns are. `unit`: the 64 columns' place.
__device__ __forceinline__ void store_packed(uint2 codes, char* unit) {
  const unsigned lanes = 0xFFu << (threadIdx.x & 24);
  const bool upper = threadIdx.x & 1, odd = threadIdx.x & 2;  // half of 16 columns; which of two times 16
  const uint32_t half = __shfl_xor_sync(lanes, upper ? codes.x : codes.y, 1);
  const uint32_t first = upper ? half : codes.x, second = upper ? codes.y : half;  // halves of two pairs
  const uint32_t low = __byte_perm(first, second, 0x5410), high = __byte_perm(first, second, 0x7632);
  const uint32_t other = __shfl_xor_sync(lanes, odd ? low : high, 2);
  const int pair = (threadIdx.x & 1) * 2 + odd, sixteens = threadIdx.x / 4 & 1;
  *reinterpret_cast<uint2*>(unit + pair * 16 + sixteens * 8) = odd ? make_uint2(other, high) : make_uint2(low, other);
}

// The values of those codes, in their own order.
template <typename T>
__device__ __forceinline__ void store_rounded(uint2 codes, float scale, T* place) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto two = static_cast<__nv_fp8x2_storage_t>((i < 2 ? codes.x : codes.y) >> i % 2 * 16 & 0xFFFF);
    const float2 values = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
    pairs[i] = pack2<T>(values.x * scale, values.y * scale);
  }
  *reinterpret_cast<uint4*>(place) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

__device__ __forceinline__ float block_max(float value) {
  __shared__ float warps[kQuantiseThreads / 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  for (int i = 0; i < kQuantiseThreads / 32; ++i) value = fmaxf(value, warps[i]);
  return value;
}

// Of the sixteen lanes that have 128 columns.
__device__ __forceinline__ float group_max(float value) {
  const unsigned lanes = 0xFFFFu << (threadIdx.x & 16);
#pragma unroll
  for (int offset = 8; offset > 0; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(lanes, value, offset));
  return value;
}

// A block per row; with kGroups a scale for each 128 columns. kPacks: those that a thread keeps; 0: it reads twice.
template <typename T, bool kGroups, int kPacks>
__global__ void __launch_bounds__(kQuantiseThreads) quantise_rows_kernel(const QuantiseRowsParams p) {
  wait_for_previous();
  const int64_t row = blockIdx.x;
  const auto* x = reinterpret_cast<const Pack<T, 8>*>(static_cast<const T*>(p.x) + row * p.inner);
  char* q = static_cast<char*>(p.q) + row * p.inner;
  T* rounded = static_cast<T*>(p.q) + row * p.inner;
  float* scales = static_cast<float*>(p.scale) + row;
  const int packs = p.inner / 8;
  Pack<T, 8> kept[kPacks > 0 ? kPacks : 1];
  float values[8], most = 0.0f;
  if constexpr (!kGroups) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int i = k * kQuantiseThreads + threadIdx.x;
      if (i < packs) kept[k] = x[i];
    }
    for (int k = 0; kPacks > 0 ? k < kPacks : k * kQuantiseThreads < packs; ++k) {
      const int i = k * kQuantiseThreads + threadIdx.x;
      if (i >= packs) break;
      unpack_eight(kPacks > 0 ? kept[k] : x[i], values);
      most = fmaxf(most, largest(values));
    }
    most = block_max(most);
    if (threadIdx.x == 0) *scales = scale_of(most);
  }
#pragma unroll
  for (int k = 0; kPacks > 0 ? k < kPacks : k * kQuantiseThreads < packs; ++k) {
    const int i = k * kQuantiseThreads + threadIdx.x;
    if (i >= packs) break;  // of sixteen lanes all or none
    unpack_eight(kPacks > 0 ? kept[k] : x[i], values);
    if constexpr (kGroups) {
      most = group_max(largest(values));
      if (threadIdx.x % 16 == 0) scales[static_cast<int64_t>(i / 16) * p.num_rows] = scale_of(most);
    }
    const float factor = factor_of(most);
    const uint2 codes = make_uint2(two_pairs(values, factor), two_pairs(values + 4, factor));
    if (p.rounds) {
      store_rounded(codes, scale_of(most), rounded + i * 8);
    } else {
      store_packed(codes, q + i / 8 * 64);
    }
  }
}

template <typename T, bool kGroups, int kPacks>
cudaError_t launch_quantise_rows(const QuantiseRowsParams& p, cudaStream_t stream) {
  return launch(Overlap::kYes, quantise_rows_kernel<T, kGroups, kPacks>, dim3(p.num_rows), kQuantiseThreads, 0, 1,
                stream, p);
}

}  // namespace

cudaError_t quantise_rows(const QuantiseRowsParams& p, cudaStream_t stream) {
  if (p.num_rows == 0) return cudaSuccess;
  if (p.dtype == DType::kFloat32) return cudaErrorNotSupported;
  const int packs = ceil_div(p.inner / 8, kQuantiseThreads);
  return with_dtype(p.dtype, [&](auto t) {
    using T = decltype(t);
    if (p.groups > 1) return launch_quantise_rows<T, true, 0>(p, stream);
    if (packs <= 2) return launch_quantise_rows<T, false, 2>(p, stream);
    return packs <= kMostPacks ? launch_quantise_rows<T, false, kMostPacks>(p, stream)
                               : launch_quantise_rows<T, false, 0>(p, stream);
  });
}

}  // namespace trt_eagle3
