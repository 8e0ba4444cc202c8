// The running softmax of VisionAttention over tiles of scores, in the registers of mma.sync and wgmma accumulators.
#pragma once

#include "common.cuh"

namespace trt_eagle3 {

// Of a thread's two rows: the running maximum m.
struct RunningMax {
  float m[2] = {-INFINITY, -INFINITY};
};

// Scores of tokens from `count` on become -inf; a tile's column of element e of tile j is 8 j + 2 (lane % 4) + e % 2.
template <int kTiles>
__device__ __forceinline__ void mask_scores(float (&scores)[kTiles][4], int count, int lane) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (8 * j + 2 * (lane % 4) + e % 2 >= count) scores[j][e] = -INFINITY;
    }
  }
}

// Scores become exp2(scale * (score - max)); `rescale` is by what the sums over the tiles before are to be multiplied.
template <int kTiles>
__device__ __forceinline__ void update_softmax(float (&scores)[kTiles][4], RunningMax& running, float scale_log2,
                                               float (&rescale)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float new_m = running.m[row];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) new_m = fmaxf(new_m, fmaxf(scores[j][2 * row], scores[j][2 * row + 1]));
    new_m = quad_max(new_m);
    rescale[row] = fast_exp2((running.m[row] - new_m) * scale_log2);
    running.m[row] = new_m;
    const float shift = new_m * scale_log2;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int e = 2 * row; e < 2 * row + 2; ++e) scores[j][e] = fast_exp2(fmaf(scores[j][e], scale_log2, -shift));
    }
  }
}

// Weights as the A operand of the next product, rounded to T as in every tensor-core attention.
template <typename T, int kTiles>
__device__ __forceinline__ void pack_weights(uint32_t (&weights)[kTiles / 2][4], const float (&scores)[kTiles][4]) {
#pragma unroll
  for (int step = 0; step < kTiles / 2; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weights[step][2 * half] = pack2<T>(scores[2 * step + half][0], scores[2 * step + half][1]);
      weights[step][2 * half + 1] = pack2<T>(scores[2 * step + half][2], scores[2 * step + half][3]);
    }
  }
}

template <int kTiles>
__device__ __forceinline__ void rescale_rows(float (&out)[kTiles][4], const float (&rescale)[2]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) out[j][e] *= rescale[e / 2];
  }
}

// Divides and writes a warp's 16 rows, of which `count` exist: `out` is element (row 0, channel 0) of T [., row_size].
// The column of `sums` after the channels holds each row's denominator.
template <typename T, int kTiles>
__device__ __forceinline__ void write_rows(T* out, int64_t row_size, int count, const float (&sums)[kTiles][4],
                                           int lane) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float inverse = 1.0f / __shfl_sync(0xffffffffu, sums[kTiles - 1][2 * row], lane & ~3);
    const int index = lane / 4 + 8 * row;
    if (index >= count) continue;
    T* target = out + index * row_size + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < kTiles - 1; ++j) {
      *reinterpret_cast<uint32_t*>(target + 8 * j) =
          pack2<T>(sums[j][2 * row] * inverse, sums[j][2 * row + 1] * inverse);
    }
  }
}

}  // namespace trt_eagle3
