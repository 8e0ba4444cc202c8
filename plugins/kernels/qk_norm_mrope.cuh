// QKNormMRope: cuts the packed projection into q, k, v; per head of q and k: RMSNorm (optional), then rotary embedding
// whose pair i (channels i and i + D/2) turns by position_ids[pair_axis[i]] * inv_freq[i].
//
// Idea: a warp owns kHeads heads of a token, lane l of each the pairs 2l and 2l + 1, so one pass reads, normalises in
// registers, turns and writes. Angles are float32 products as in transformers, with the full-range sine and cosine: no
// table to outgrow. Of many tokens those cost as much as the bytes, so several heads share them. Bytes moved:
// 2 * N * (Hq + 2 Hkv) * D * sizeof(T). Measured: docs/measurements.md, "Kernels".
#pragma once

#include "common.cuh"

namespace trt_eagle3 {

// A lane's pairs of a head, of token `token`: channels i and i + D / 2 for i in (step * 32 + lane) * 2 + {0, 1}.
template <typename T, int kSteps>
struct RopeHead {
  using Pair = Pack<T, 2>;
  Pair low[kSteps], high[kSteps];

  __device__ __forceinline__ void read(const T* source, int half, int lane) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int pair = (s * 32 + lane) * 2;
      if (pair >= half) continue;
      low[s] = *reinterpret_cast<const Pair*>(source + pair);
      high[s] = *reinterpret_cast<const Pair*>(source + half + pair);
    }
  }

  __device__ __forceinline__ void write(T* target, int half, int lane) const {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int pair = (s * 32 + lane) * 2;
      if (pair >= half) continue;
      *reinterpret_cast<Pair*>(target + pair) = low[s];
      *reinterpret_cast<Pair*>(target + half + pair) = high[s];
    }
  }

  // Of the whole head: 1 / sqrt(mean of squares + epsilon).
  __device__ __forceinline__ float inverse_rms(int half, int lane, float epsilon) const {
    float squares = 0.0f;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if ((s * 32 + lane) * 2 >= half) continue;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float a = to_float(low[s].values[e]), b = to_float(high[s].values[e]);
        squares += a * a + b * b;
      }
    }
    return rsqrtf(warp_sum(squares) / (2 * half) + epsilon);
  }

  // Scales by `scale` and `weight`, unless that is null, and turns.
  __device__ __forceinline__ void turn(const float2 (&turns)[kSteps][2], float scale, const T* weight, int half,
                                       int lane) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int pair = (s * 32 + lane) * 2;
      if (pair >= half) continue;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float a = to_float(low[s].values[e]) * scale, b = to_float(high[s].values[e]) * scale;
        if (weight != nullptr) {
          a *= to_float(weight[pair + e]);
          b *= to_float(weight[half + pair + e]);
        }
        const float cosine = turns[s][e].x, sine = turns[s][e].y;
        low[s].values[e] = from_float<T>(a * cosine - b * sine);
        high[s].values[e] = from_float<T>(b * cosine + a * sine);
      }
    }
  }
};

// Cosine and sine of a lane's pairs.
template <int kSteps>
__device__ __forceinline__ void find_turns(const QKNormMRopeParams& p, int64_t token, int lane,
                                           float2 (&turns)[kSteps][2]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = (s * 32 + lane) * 2 + e;
      if (i >= p.head_dim / 2) continue;
      const int axis = min(max(p.pair_axis[i], 0), 2);  // an engine builder times kernels on inputs of any content
      const int position = p.position_ids[static_cast<int64_t>(axis) * p.num_tokens + token];
      sincosf(static_cast<float>(position) * p.inv_freq[i], &turns[s][e].y, &turns[s][e].x);
    }
  }
}

// grid (N, heads / (4 * kHeads)); kSteps * 64 pairs cover D / 2.
template <typename T, int kSteps, int kHeads>
__global__ void __launch_bounds__(128) qk_norm_mrope_kernel(const QKNormMRopeParams p) {
  wait_for_previous_beside_next();
  const int lane = threadIdx.x % 32, half = p.head_dim / 2;
  const int first = (blockIdx.y * 4 + threadIdx.x / 32) * kHeads;  // of 0 .. Hq + 2 Hkv
  const int num_heads = p.num_heads + 2 * p.num_kv_heads;
  if (first >= num_heads) return;
  const int64_t token = blockIdx.x;
  RopeHead<T, kSteps> heads[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = min(first + i, num_heads - 1);
    heads[i].read(static_cast<const T*>(p.qkv) + (token * num_heads + head) * p.head_dim, half, lane);
  }
  float2 turns[kSteps][2];
  if (first < p.num_heads + p.num_kv_heads) find_turns(p, token, lane, turns);
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = first + i;
    if (head >= num_heads) return;
    if (head < p.num_heads + p.num_kv_heads) {
      const T* weight = static_cast<const T*>(head < p.num_heads ? p.q_norm : p.k_norm);
      const float scale = weight == nullptr ? 1.0f : heads[i].inverse_rms(half, lane, p.epsilon);
      heads[i].turn(turns, scale, weight, half, lane);
    }
    T* target =
        head < p.num_heads ? static_cast<T*>(p.q) + (token * p.num_heads + head) * p.head_dim
        : head < p.num_heads + p.num_kv_heads
            ? static_cast<T*>(p.k) + (token * p.num_kv_heads + head - p.num_heads) * p.head_dim
            : static_cast<T*>(p.v) + (token * p.num_kv_heads + head - p.num_heads - p.num_kv_heads) * p.head_dim;
    heads[i].write(target, half, lane);
  }
}

constexpr int kManyRopeTokens = 256;  // from which on warps take several heads

inline cudaError_t launch_qk_norm_mrope(const QKNormMRopeParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return cudaSuccess;
  if (p.head_dim > 256 || p.head_dim % 4 != 0) return cudaErrorInvalidValue;
  constexpr int kHeads = 6;
  const bool many = p.num_tokens >= kManyRopeTokens && p.head_dim <= 128;
  const dim3 grid(p.num_tokens, ceil_div(p.num_heads + 2 * p.num_kv_heads, many ? 4 * kHeads : 4));
  return with_dtype(p.dtype, [&](auto t) {
    using T = decltype(t);
    const auto kernel = many                ? qk_norm_mrope_kernel<T, 1, kHeads>
                        : p.head_dim <= 128 ? qk_norm_mrope_kernel<T, 1, 1>
                                            : qk_norm_mrope_kernel<T, 2, 1>;
    return launch(Overlap::kYes, kernel, grid, 128, 0, 1, stream, p);
  });
}

}  // namespace trt_eagle3
