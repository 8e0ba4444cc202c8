// Rows of x as e4m3 and scales, for stock FP8 products: scale = largest |x| / 448, of a row or of each 128 columns of
// it, and x times 448 / largest rounded once, in packed_weight.cuh's order of columns. x is read twice, the second time
// from a cache. Bytes moved: x, half of that written.
#include <cuda_fp8.h>

#include "common.cuh"

namespace trt_eagle3 {
namespace {

constexpr int kQuantiseThreads = 256;
constexpr float kLargestE4m3 = 448.0f;
constexpr float kSmallest = 1e-30f;  // what is smaller counts as 0: its factor may be infinite

// Of one row, the 16 values that stand at `piece` times 16 in packed order.
template <typename T>
__device__ __forceinline__ void load_piece(const T* row, int piece, float2 (&values)[8]) {
  const T* first = row + piece / 4 * 64 + piece % 4 * 2;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Pack<T, 2> pair = *reinterpret_cast<const Pack<T, 2>*>(first + i * 8);
    values[i] = make_float2(to_float(pair.values[0]), to_float(pair.values[1]));
  }
}

__device__ __forceinline__ float largest(const float2 (&values)[8]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = fmaxf(most, fmaxf(fabsf(values[i].x), fabsf(values[i].y)));
  return most;
}

__device__ __forceinline__ float scale_of(float most) { return most > kSmallest ? most / kLargestE4m3 : 1.0f; }
__device__ __forceinline__ float factor_of(float most) { return most > kSmallest ? kLargestE4m3 / most : 1.0f; }

__device__ __forceinline__ uint32_t two_pairs(float2 a, float2 b, float factor) {
  const float2 low = make_float2(a.x * factor, a.y * factor), high = make_float2(b.x * factor, b.y * factor);
  return __nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3) |
         static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3)) << 16;
}

__device__ __forceinline__ uint4 quantised(const float2 (&v)[8], float factor) {
  return make_uint4(two_pairs(v[0], v[1], factor), two_pairs(v[2], v[3], factor), two_pairs(v[4], v[5], factor),
                    two_pairs(v[6], v[7], factor));
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

// A block per row; with kGroups a scale for each 128 columns, which eight lanes have.
template <typename T, bool kGroups>
__global__ void __launch_bounds__(kQuantiseThreads) quantise_rows_kernel(const QuantiseRowsParams p) {
  wait_for_previous();
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.inner;
  uint4* q = reinterpret_cast<uint4*>(static_cast<char*>(p.q) + row * p.inner);
  float* scales = static_cast<float*>(p.scale) + row;
  const int pieces = p.inner / 16;
  float2 values[8];
  float most = 0.0f;
  if constexpr (!kGroups) {
    for (int i = threadIdx.x; i < pieces; i += kQuantiseThreads) {
      load_piece(x, i, values);
      most = fmaxf(most, largest(values));
    }
    most = block_max(most);
    if (threadIdx.x == 0) *scales = scale_of(most);
  }
  for (int i = threadIdx.x; i < pieces; i += kQuantiseThreads) {  // of eight lanes all or none
    load_piece(x, i, values);
    if constexpr (kGroups) {
      most = largest(values);
      const unsigned lanes = 0xFFu << (threadIdx.x % 32 / 8 * 8);
#pragma unroll
      for (int offset = 4; offset > 0; offset >>= 1) most = fmaxf(most, __shfl_xor_sync(lanes, most, offset));
      if (threadIdx.x % 8 == 0) scales[static_cast<int64_t>(i / 8) * p.num_rows] = scale_of(most);
    }
    q[i] = quantised(values, factor_of(most));
  }
}

}  // namespace

cudaError_t quantise_rows(const QuantiseRowsParams& p, cudaStream_t stream) {
  if (p.num_rows == 0) return cudaSuccess;
  if (p.dtype == DType::kFloat32) return cudaErrorNotSupported;
  return with_dtype(p.dtype, [&](auto t) {
    using T = decltype(t);
    const auto kernel = p.groups > 1 ? quantise_rows_kernel<T, true> : quantise_rows_kernel<T, false>;
    return launch(Overlap::kYes, kernel, dim3(p.num_rows), kQuantiseThreads, 0, 1, stream, p);
  });
}

}  // namespace trt_eagle3
