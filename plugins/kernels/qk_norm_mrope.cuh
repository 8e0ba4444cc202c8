// QKNormMRope: cuts the packed projection into q, k, v; per head of q and k: RMSNorm (optional), then rotary embedding
// whose pair i (channels i and i + D/2) turns by position_ids[pair_axis[i]] * inv_freq[i].
//
// Idea: a warp owns a head of a token, each lane some neighbouring pairs, so one pass reads, normalises in registers,
// turns and writes. Angles are float32 products as in transformers, with the full-range sine and cosine: no table to
// outgrow. Of many tokens: qk_norm_mrope_prompt.cuh. Bytes moved: 2 * N * (Hq + 2 Hkv) * D * sizeof(T). Measured:
// docs/measurements.md, "Kernels".
#pragma once

#include "common.cuh"

namespace trt_eagle3 {

// How the pairs of a head (channels i and i + D / 2) lie in lanes: pair (step * 32 + lane) * Width + {0 .. Width - 1}.
template <typename Element, int kWidth, int kSteps>
struct RopeLayout {
  using T = Element;
  using Values = Pack<T, kWidth>;
  using Turns = float2[kSteps][kWidth];  // cosine and sine
  static constexpr int Width = kWidth, Steps = kSteps;
  static __device__ __forceinline__ int pair(int step) { return (step * 32 + threadIdx.x % 32) * kWidth; }
};

// A lane's pairs of a head.
template <typename Layout>
struct RopeHead {
  using T = typename Layout::T;
  using Values = typename Layout::Values;
  Values low[Layout::Steps], high[Layout::Steps];

  __device__ __forceinline__ void read(const T* source, int half) {
#pragma unroll
    for (int s = 0; s < Layout::Steps; ++s) {
      const int pair = Layout::pair(s);
      if (pair >= half) continue;
      low[s] = *reinterpret_cast<const Values*>(source + pair);
      high[s] = *reinterpret_cast<const Values*>(source + half + pair);
    }
  }

  __device__ __forceinline__ void write(T* target, int half) const {
#pragma unroll
    for (int s = 0; s < Layout::Steps; ++s) {
      const int pair = Layout::pair(s);
      if (pair >= half) continue;
      *reinterpret_cast<Values*>(target + pair) = low[s];
      *reinterpret_cast<Values*>(target + half + pair) = high[s];
    }
  }

  // Of the whole head: 1 / sqrt(mean of squares + epsilon).
  __device__ __forceinline__ float inverse_rms(int half, float epsilon) const {
    float squares = 0.0f;
#pragma unroll
    for (int s = 0; s < Layout::Steps; ++s) {
      if (Layout::pair(s) >= half) continue;
#pragma unroll
      for (int e = 0; e < Layout::Width; ++e) {
        const float a = to_float(low[s].values[e]), b = to_float(high[s].values[e]);
        squares += a * a + b * b;
      }
    }
    return rsqrtf(warp_sum(squares) / (2 * half) + epsilon);
  }

  // Scales by `scale` and, with kNormed, `weights`, and turns.
  template <bool kNormed>
  __device__ __forceinline__ void turn(const typename Layout::Turns& turns, float scale, const RopeHead& weights, int half) {
#pragma unroll
    for (int s = 0; s < Layout::Steps; ++s) {
      if (Layout::pair(s) >= half) continue;
#pragma unroll
      for (int e = 0; e < Layout::Width; ++e) {
        float a = to_float(low[s].values[e]) * scale, b = to_float(high[s].values[e]) * scale;
        if constexpr (kNormed) {
          a *= to_float(weights.low[s].values[e]);
          b *= to_float(weights.high[s].values[e]);
        }
        const float cosine = turns[s][e].x, sine = turns[s][e].y;
        low[s].values[e] = from_float<T>(a * cosine - b * sine);
        high[s].values[e] = from_float<T>(b * cosine + a * sine);
      }
    }
  }
};

template <typename Layout>
__device__ __forceinline__ void find_turns(const QKNormMRopeParams& p, int64_t token, typename Layout::Turns& turns) {
#pragma unroll
  for (int s = 0; s < Layout::Steps; ++s) {
#pragma unroll
    for (int e = 0; e < Layout::Width; ++e) {
      const int i = Layout::pair(s) + e;
      if (i >= p.head_dim / 2) continue;
      const int axis = min(max(p.pair_axis[i], 0), 2);  // an engine builder times kernels on inputs of any content
      const int position = p.position_ids[static_cast<int64_t>(axis) * p.num_tokens + token];
      sincosf(static_cast<float>(position) * p.inv_freq[i], &turns[s][e].y, &turns[s][e].x);
    }
  }
}

// Where head `head` of 0 .. Hq + 2 Hkv of a token goes.
template <typename T>
__device__ __forceinline__ T* rope_target(const QKNormMRopeParams& p, int64_t token, int head) {
  if (head < p.num_heads) return static_cast<T*>(p.q) + (token * p.num_heads + head) * p.head_dim;
  const int kv_head = head - p.num_heads;
  if (kv_head < p.num_kv_heads) return static_cast<T*>(p.k) + (token * p.num_kv_heads + kv_head) * p.head_dim;
  return static_cast<T*>(p.v) + (token * p.num_kv_heads + kv_head - p.num_kv_heads) * p.head_dim;
}

// grid (N, heads / 4); a warp takes a head. Angles and norms' weights, which take as long as the head itself, are there
// before the launch before has ended, where the caller calls the positions prefetch_safe.
template <typename Layout>
__global__ void __launch_bounds__(128) qk_norm_mrope_kernel(const QKNormMRopeParams p) {
  const bool early = p.prefetch_safe != 0;
  let_next_come_up();
  if (!early) wait_for_previous_beside_next();
  using T = typename Layout::T;
  const int half = p.head_dim / 2, num_heads = p.num_heads + 2 * p.num_kv_heads, rotated = num_heads - p.num_kv_heads;
  const int head = blockIdx.y * 4 + threadIdx.x / 32;
  const int64_t token = blockIdx.x;
  const T* weight = static_cast<const T*>(head < p.num_heads ? p.q_norm : p.k_norm);
  RopeHead<Layout> values, weights = {};
  typename Layout::Turns turns;
  if (head < rotated) {
    find_turns<Layout>(p, token, turns);
    if (weight != nullptr) weights.read(weight, half);
  }
  if (early) wait_for_previous_beside_next();
  if (head >= num_heads) return;
  values.read(static_cast<const T*>(p.qkv) + (token * num_heads + head) * p.head_dim, half);
  if (head < rotated && weight != nullptr) {
    values.template turn<true>(turns, values.inverse_rms(half, p.epsilon), weights, half);
  } else if (head < rotated) {
    values.template turn<false>(turns, 1.0f, weights, half);
  }
  values.write(rope_target<T>(p, token, head), half);
}

template <typename Layout>
cudaError_t launch_qk_norm_mrope_as(const QKNormMRopeParams& p, cudaStream_t stream) {
  const dim3 grid(p.num_tokens, ceil_div(p.num_heads + 2 * p.num_kv_heads, 4));
  return launch(Overlap::kYes, qk_norm_mrope_kernel<Layout>, grid, 128, 0, 1, stream, p);
}

}  // namespace trt_eagle3
