// AddRmsNorm: sum = x + residual (rounded to T), y = sum / rms(sum) * weight in float32 inside.
//
// Idea: a block owns a row and keeps it in registers as 16-byte packs between the sum of squares and the scaling, so
// each value is read once and written once. Wider rows than the registers hold, or unaligned ones, are read twice.
// Bytes moved: n * H * sizeof(T) * (4 with a residual, 2 without). Measured: docs/measurements.md, "Kernels".
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
template <typename T, int kWidth, int kPacks>
__global__ void __launch_bounds__(1024) add_rms_norm_kernel(const AddRmsNormParams p) {
  wait_for_previous();
  using Values = Pack<T, kWidth>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * p.hidden;
  Values values[kPacks], weights[kPacks];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = (i * blockDim.x + threadIdx.x) * kWidth;
    if (column >= p.hidden) continue;
    values[i] = *reinterpret_cast<const Values*>(static_cast<const T*>(p.x) + row + column);
    weights[i] = *reinterpret_cast<const Values*>(static_cast<const T*>(p.weight) + column);
    if (p.residual != nullptr) {
      const Values other = *reinterpret_cast<const Values*>(static_cast<const T*>(p.residual) + row + column);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        values[i].values[e] = from_float<T>(to_float(values[i].values[e]) + to_float(other.values[e]));
      }
      *reinterpret_cast<Values*>(static_cast<T*>(p.sum) + row + column) = values[i];
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e) squares += to_float(values[i].values[e]) * to_float(values[i].values[e]);
  }
  const float inverse_rms = rsqrtf(block_sum(squares) / p.hidden + p.epsilon);
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = (i * blockDim.x + threadIdx.x) * kWidth;
    if (column >= p.hidden) continue;
    Values out;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      out.values[e] = from_float<T>(to_float(values[i].values[e]) * inverse_rms * to_float(weights[i].values[e]));
    }
    *reinterpret_cast<Values*>(static_cast<T*>(p.y) + row + column) = out;
  }
}

// Any H and alignment. The second pass reads what the first wrote or read, from cache.
template <typename T>
__global__ void __launch_bounds__(1024) add_rms_norm_plain_kernel(const AddRmsNormParams p) {
  wait_for_previous();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * p.hidden;
  const T* x = static_cast<const T*>(p.x) + row;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < p.hidden; i += blockDim.x) {
    T value = x[i];
    if (p.residual != nullptr) {
      value = from_float<T>(to_float(value) + to_float(static_cast<const T*>(p.residual)[row + i]));
      static_cast<T*>(p.sum)[row + i] = value;
    }
    squares += to_float(value) * to_float(value);
  }
  const float inverse_rms = rsqrtf(block_sum(squares) / p.hidden + p.epsilon);
  const T* total = p.residual != nullptr ? static_cast<const T*>(p.sum) + row : x;
  for (int i = threadIdx.x; i < p.hidden; i += blockDim.x) {
    const float scaled = to_float(total[i]) * inverse_rms * to_float(static_cast<const T*>(p.weight)[i]);
    static_cast<T*>(p.y)[row + i] = from_float<T>(scaled);
  }
}

template <typename T>
cudaError_t launch_add_rms_norm(const AddRmsNormParams& p, cudaStream_t stream) {
  constexpr int kWidth = 16 / sizeof(T);
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  const bool packs = p.hidden % kWidth == 0 && aligned(p.x) && aligned(p.y) && aligned(p.weight) &&
                     aligned(p.residual) && aligned(p.sum);
  const int count = p.hidden / kWidth;
  if (!packs || count > 4096)
    return launch(Overlap::kYes, add_rms_norm_plain_kernel<T>, dim3(p.num_rows), 1024, 0, 1, stream, p);
  if (count > 1024)
    return launch(Overlap::kYes, add_rms_norm_kernel<T, kWidth, 4>, dim3(p.num_rows), 1024, 0, 1, stream, p);
  const int threads = ceil_div(count, 32) * 32;
  return launch(Overlap::kYes, add_rms_norm_kernel<T, kWidth, 1>, dim3(p.num_rows), threads, 0, 1, stream, p);
}

}  // namespace trt_eagle3
