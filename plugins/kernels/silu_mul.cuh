// SiluMul: out = silu(gate) * up, with gate and up side by side in one projection.
//
// Idea: one pass of 16-byte accesses in place of a split and three element-wise launches.
// Bytes moved: 3 * n * width * sizeof(T). Measured: docs/measurements.md, "Kernels".
#pragma once

#include "common.cuh"

namespace trt_eagle3 {

// grid (blocks of a row, n)
template <typename T, int kWidth>
__global__ void __launch_bounds__(256) silu_mul_kernel(const SiluMulParams p) {
  wait_for_previous_beside_next();
  using Values = Pack<T, kWidth>;
  const int column = (blockIdx.x * 256 + threadIdx.x) * kWidth;
  if (column >= p.width) return;
  const int64_t row = blockIdx.y;
  const T* gate_up = static_cast<const T*>(p.gate_up) + row * 2 * p.width;
  const Values gate = *reinterpret_cast<const Values*>(gate_up + column);
  const Values up = *reinterpret_cast<const Values*>(gate_up + p.width + column);
  Values out;
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    out.values[e] = from_float<T>(silu<T>(to_float(gate.values[e])) * to_float(up.values[e]));
  }
  *reinterpret_cast<Values*>(static_cast<T*>(p.out) + row * p.width + column) = out;
}

template <typename T>
cudaError_t launch_silu_mul(const SiluMulParams& p, cudaStream_t stream) {
  constexpr int kWidth = 16 / sizeof(T);
  const bool packs = p.width % kWidth == 0 && reinterpret_cast<uintptr_t>(p.gate_up) % 16 == 0 &&
                     reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
  const dim3 grid(ceil_div(p.width, 256 * (packs ? kWidth : 1)), p.num_rows);
  return launch(Overlap::kYes, packs ? silu_mul_kernel<T, kWidth> : silu_mul_kernel<T, 1>, grid, 256, 0, 1, stream, p);
}

}  // namespace trt_eagle3
