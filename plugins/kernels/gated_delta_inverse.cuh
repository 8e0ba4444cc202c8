// GatedDelta by tensor cores: (I + A)^-1 of a chunk's strictly lower A, in float32.
#pragma once

#include "gated_delta_fragments.cuh"

namespace trt_eagle3 {

// Blocks of 16 by forward substitution, then [T1, 0; -T2 A T1, T2] of pairs of 16 and of the pair of 32.
struct DeltaInverse {
  static constexpr int kPitch = 68;  // floats
  static constexpr int kSpare = 32 * 32;
  float* matrix;  // [64, kPitch]: A with zeros above it within each 32 x 32 block of the diagonal; then T
  float* spare;   // [kSpare]

  // Barriers before and after it are the caller's.
  __device__ __forceinline__ void run() const {
    if (threadIdx.x < 128) invert_block(threadIdx.x / 32 * 16, threadIdx.x % 16);
    __syncthreads();
    const int pair = threadIdx.x / 128 * 32;
    merge<16, 2>(pair, spare + pair * 8, threadIdx.x % 128);
    __syncthreads();
    merge<32, 4>(0, spare, threadIdx.x);
  }

 private:
  __device__ __forceinline__ void invert_block(int first, int column) const {
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float* row = matrix + (first + i) * kPitch + first;
      float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
      for (int j = 0; j < i; ++j) sum -= row[j] * x[j];
      x[i] = sum;
    }
    __syncwarp();
    if (threadIdx.x % 32 >= 16) return;  // which has had a column of the others
#pragma unroll
    for (int i = 0; i < 16; ++i) matrix[(first + i) * kPitch + first + column] = x[i];
  }

  // kSize * kSize / kEach threads have kEach columns of a row each; a barrier stands between the two products.
  template <int kSize, int kEach>
  __device__ __forceinline__ void merge(int first, float* product, int thread) const {
    const int i = thread / (kSize / kEach), column = thread % (kSize / kEach) * kEach;
    const float* upper = matrix + first * kPitch + first;
    float* corner = matrix + (first + kSize) * kPitch + first;
    float sums[kEach] = {};
    multiply<kSize>(corner + i * kPitch, upper + column, kPitch, sums);
#pragma unroll
    for (int e = 0; e < kEach; ++e) product[i * kSize + column + e] = sums[e];
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kEach; ++e) sums[e] = 0.0f;
    multiply<kSize>(corner + kSize + i * kPitch, product + column, kSize, sums);
#pragma unroll
    for (int e = 0; e < kEach; ++e) corner[i * kPitch + column + e] = -sums[e];
  }

  template <int kSize, int kEach>
  static __device__ __forceinline__ void multiply(const float* row, const float* columns, int pitch,
                                                  float (&sums)[kEach]) {
#pragma unroll 2
    for (int k = 0; k < kSize; k += 4) {
      float left[4];
      load4(row + k, left);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const Pack<float, kEach> right = *reinterpret_cast<const Pack<float, kEach>*>(columns + (k + step) * pitch);
#pragma unroll
        for (int e = 0; e < kEach; ++e) sums[e] += left[step] * right.values[e];
      }
    }
  }
};

}  // namespace trt_eagle3
