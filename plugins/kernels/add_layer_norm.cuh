// AddLayerNorm: sum = x + residual (rounded to T), y = (sum - mean) / sqrt(variance + epsilon) * weight + bias in
// float32 inside; without a residual, y = LayerNorm(x).
//
// Idea: a block owns a row and keeps it in registers as 16-byte packs, so each value is read once and written once;
// mean and variance are two block sums, the second of differences from the mean. Wider or unaligned rows are read
// thrice. Bytes moved: n * H * sizeof(T) * (2, or 4 with a residual). Measured: docs/measurements.md, "Images".
#pragma once

#include "add_rms_norm.cuh"

namespace trt_eagle3 {

// grid (n); a thread holds kWidth neighbouring values, or none.
template <typename T, int kWidth>
__global__ void __launch_bounds__(1024) add_layer_norm_kernel(const AddLayerNormParams p) {
  using Values = Pack<T, kWidth>;
  wait_for_previous_beside_next();
  const int column = threadIdx.x * kWidth;
  const bool held = column < p.hidden;
  const int64_t place = static_cast<int64_t>(blockIdx.x) * p.hidden + column;
  Values weight = {}, bias = {};
  float values[kWidth] = {}, total = 0.0f;
  if (held) {
    Values x = *reinterpret_cast<const Values*>(static_cast<const T*>(p.x) + place);
    weight = *reinterpret_cast<const Values*>(static_cast<const T*>(p.weight) + column);
    bias = *reinterpret_cast<const Values*>(static_cast<const T*>(p.bias) + column);
    if (p.residual != nullptr) {
      const Values other = *reinterpret_cast<const Values*>(static_cast<const T*>(p.residual) + place);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        x.values[e] = from_float<T>(to_float(x.values[e]) + to_float(other.values[e]));
      }
      *reinterpret_cast<Values*>(static_cast<T*>(p.sum) + place) = x;
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e) total += values[e] = to_float(x.values[e]);
  }
  const float mean = block_sum(total) / p.hidden;
  float squares = 0.0f;
#pragma unroll
  for (int e = 0; e < kWidth; ++e) squares += held ? (values[e] - mean) * (values[e] - mean) : 0.0f;
  __syncthreads();  // block_sum's memory is read by all before it is written again
  const float inverse = rsqrtf(block_sum(squares) / p.hidden + p.epsilon);
  if (!held) return;
  Values y;
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    y.values[e] = from_float<T>((values[e] - mean) * inverse * to_float(weight.values[e]) + to_float(bias.values[e]));
  }
  *reinterpret_cast<Values*>(static_cast<T*>(p.y) + place) = y;
}

// Any H and alignment.
template <typename T>
__global__ void __launch_bounds__(1024) add_layer_norm_plain_kernel(const AddLayerNormParams p) {
  wait_for_previous_beside_next();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * p.hidden;
  const T* source = static_cast<const T*>(p.x) + row;
  float total = 0.0f, squares = 0.0f;
  if (p.residual != nullptr) {
    T* sum = static_cast<T*>(p.sum) + row;
    for (int i = threadIdx.x; i < p.hidden; i += blockDim.x) {
      sum[i] = from_float<T>(to_float(source[i]) + to_float(static_cast<const T*>(p.residual)[row + i]));
    }
    source = sum;  // a thread reads what it wrote itself
  }
  for (int i = threadIdx.x; i < p.hidden; i += blockDim.x) total += to_float(source[i]);
  const float mean = block_sum(total) / p.hidden;
  for (int i = threadIdx.x; i < p.hidden; i += blockDim.x) {
    squares += (to_float(source[i]) - mean) * (to_float(source[i]) - mean);
  }
  __syncthreads();
  const float inverse = rsqrtf(block_sum(squares) / p.hidden + p.epsilon);
  for (int i = threadIdx.x; i < p.hidden; i += blockDim.x) {
    const float scaled = (to_float(source[i]) - mean) * inverse * to_float(static_cast<const T*>(p.weight)[i]);
    static_cast<T*>(p.y)[row + i] = from_float<T>(scaled + to_float(static_cast<const T*>(p.bias)[i]));
  }
}

template <typename T>
cudaError_t launch_add_layer_norm(const AddLayerNormParams& p, cudaStream_t stream) {
  constexpr int kWidth = 16 / sizeof(T);
  const int count = ceil_div(p.hidden, kWidth);
  if (p.hidden % kWidth != 0 || count > 1024) {
    return launch(Overlap::kYes, add_layer_norm_plain_kernel<T>, dim3(p.num_rows), 1024, 0, 1, stream, p);
  }
  const int threads = ceil_div(count, 32) * 32;
  return launch(Overlap::kYes, add_layer_norm_kernel<T, kWidth>, dim3(p.num_rows), threads, 0, 1, stream, p);
}

}  // namespace trt_eagle3
