// AddRmsNorm: sum = x + residual (rounded to the stream's type S), y = sum / rms(sum) * (weight + offset) in float32
// inside.
// Types: T of weight and y; X of x; S of residual and sum, or, without a residual, of x. X and S are T or float32.
//
// Idea: a block owns a row and keeps it in registers as 16-byte packs between the sum of squares and the scaling, so
// each value is read once and written once. Wider rows than the registers hold, or unaligned ones, are read twice.
// Bytes moved: n * H * (sizeof(X) + sizeof(T) + 2 * sizeof(S) with a residual). Measured: docs/measurements.md,
// "Kernels".
#pragma once

#include "common.cuh"

namespace trt_eagle3 {

__device__ __forceinline__ float block_sum(float x) {
  __shared__ float parts[32];
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : 0.0f);
}

// grid (n); kPacks packs of kWidth values per thread cover the row.
template <typename T, typename X, typename S, int kWidth, int kPacks>
__global__ void __launch_bounds__(1024) add_rms_norm_kernel(const AddRmsNormParams p) {
  wait_for_previous_beside_next();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * p.hidden;
  Pack<S, kWidth> values[kPacks];
  Pack<T, kWidth> weights[kPacks];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = (i * blockDim.x + threadIdx.x) * kWidth;
    if (column >= p.hidden) continue;
    const auto x = *reinterpret_cast<const Pack<X, kWidth>*>(static_cast<const X*>(p.x) + row + column);
    weights[i] = *reinterpret_cast<const Pack<T, kWidth>*>(static_cast<const T*>(p.weight) + column);
    if (p.residual != nullptr) {
      const auto other = *reinterpret_cast<const Pack<S, kWidth>*>(static_cast<const S*>(p.residual) + row + column);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        values[i].values[e] = from_float<S>(to_float(x.values[e]) + to_float(other.values[e]));
      }
      *reinterpret_cast<Pack<S, kWidth>*>(static_cast<S*>(p.sum) + row + column) = values[i];
    } else {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) values[i].values[e] = from_float<S>(to_float(x.values[e]));
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e) squares += to_float(values[i].values[e]) * to_float(values[i].values[e]);
  }
  const float inverse_rms = rsqrtf(block_sum(squares) / p.hidden + p.epsilon);
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = (i * blockDim.x + threadIdx.x) * kWidth;
    if (column >= p.hidden) continue;
    Pack<T, kWidth> out;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      out.values[e] = from_float<T>(to_float(values[i].values[e]) * inverse_rms *
                                     (to_float(weights[i].values[e]) + p.weight_offset));
    }
    *reinterpret_cast<Pack<T, kWidth>*>(static_cast<T*>(p.y) + row + column) = out;
  }
}

// Any H and alignment. The second pass reads what the first wrote or read, from cache.
template <typename T, typename X, typename S>
__global__ void __launch_bounds__(1024) add_rms_norm_plain_kernel(const AddRmsNormParams p) {
  wait_for_previous_beside_next();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * p.hidden;
  const X* x = static_cast<const X*>(p.x) + row;
  const S* residual = static_cast<const S*>(p.residual) + row;
  S* sum = static_cast<S*>(p.sum) + row;
  const bool adds = p.residual != nullptr;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < p.hidden; i += blockDim.x) {
    float value = to_float(x[i]);
    if (adds) {
      const S rounded = from_float<S>(value + to_float(residual[i]));
      sum[i] = rounded;
      value = to_float(rounded);
    }
    squares += value * value;
  }
  const float inverse_rms = rsqrtf(block_sum(squares) / p.hidden + p.epsilon);
  for (int i = threadIdx.x; i < p.hidden; i += blockDim.x) {
    const float value = adds ? to_float(sum[i]) : to_float(x[i]);
    const float scaled = value * inverse_rms * (to_float(static_cast<const T*>(p.weight)[i]) + p.weight_offset);
    static_cast<T*>(p.y)[row + i] = from_float<T>(scaled);
  }
}

template <typename T, typename X, typename S>
cudaError_t launch_add_rms_norm_typed(const AddRmsNormParams& p, cudaStream_t stream) {
  constexpr int kWidth = 16 / sizeof(T);
  const auto aligned = [](const void* pointer, size_t size) {
    return reinterpret_cast<uintptr_t>(pointer) % (size * kWidth) == 0;
  };
  const bool packs = p.hidden % kWidth == 0 && aligned(p.x, sizeof(X)) && aligned(p.y, sizeof(T)) &&
                     aligned(p.weight, sizeof(T)) && aligned(p.residual, sizeof(S)) && aligned(p.sum, sizeof(S));
  const int count = p.hidden / kWidth;
  if (!packs || count > 4096)
    return launch(Overlap::kYes, add_rms_norm_plain_kernel<T, X, S>, dim3(p.num_rows), 1024, 0, 1, stream, p);
  if (count > 1024)
    return launch(Overlap::kYes, add_rms_norm_kernel<T, X, S, kWidth, 4>, dim3(p.num_rows), 1024, 0, 1, stream, p);
  const int threads = ceil_div(count, 32) * 32;
  return launch(Overlap::kYes, add_rms_norm_kernel<T, X, S, kWidth, 1>, dim3(p.num_rows), threads, 0, 1, stream, p);
}

template <typename T>
cudaError_t launch_add_rms_norm(const AddRmsNormParams& p, cudaStream_t stream) {
  const DType stream_dtype = p.residual != nullptr ? p.residual_dtype : p.x_dtype;
  if (p.x_dtype == p.dtype && stream_dtype == p.dtype) return launch_add_rms_norm_typed<T, T, T>(p, stream);
  if (stream_dtype != DType::kFloat32) return cudaErrorInvalidValue;
  if (p.x_dtype == DType::kFloat32) return launch_add_rms_norm_typed<T, float, float>(p, stream);
  if (p.x_dtype == p.dtype) return launch_add_rms_norm_typed<T, T, float>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace trt_eagle3
