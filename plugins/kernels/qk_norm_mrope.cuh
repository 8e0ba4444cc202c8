// QKNormMRope: cuts the packed projection into q, k, v; per head of q and k: RMSNorm (optional), then rotary embedding
// whose pair i (channels i and i + D/2) turns by position_ids[pair_axis[i]] * inv_freq[i].
//
// Idea: a warp owns a head of a token, lane l the pairs 2l and 2l + 1, so one pass reads, normalises in registers,
// turns and writes. Angles are float32 products as in transformers, with the full-range sine and cosine: no table to
// outgrow. Bytes moved: 2 * N * (Hq + 2 Hkv) * D * sizeof(T). Measured: docs/measurements.md, "Kernels".
#pragma once

#include "common.cuh"

namespace trt_eagle3 {

// grid (N, heads / kHeadsPerBlock); kSteps * 64 pairs cover D / 2.
template <typename T, int kSteps>
__global__ void __launch_bounds__(128) qk_norm_mrope_kernel(const QKNormMRopeParams p) {
  wait_for_previous_beside_next();
  using Pair = Pack<T, 2>;
  const int lane = threadIdx.x % 32;
  const int head = blockIdx.y * 4 + threadIdx.x / 32;  // 0 .. Hq + 2 Hkv
  const int num_heads = p.num_heads + 2 * p.num_kv_heads;
  if (head >= num_heads) return;
  const int64_t token = blockIdx.x;
  const int half = p.head_dim / 2;
  const bool is_q = head < p.num_heads;
  const bool is_v = head >= p.num_heads + p.num_kv_heads;
  const T* source = static_cast<const T*>(p.qkv) + (token * num_heads + head) * p.head_dim;
  T* target = is_q ? static_cast<T*>(p.q) + (token * p.num_heads + head) * p.head_dim
              : is_v
                  ? static_cast<T*>(p.v) + (token * p.num_kv_heads + head - p.num_heads - p.num_kv_heads) * p.head_dim
                  : static_cast<T*>(p.k) + (token * p.num_kv_heads + head - p.num_heads) * p.head_dim;

  Pair low[kSteps], high[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int pair = (s * 32 + lane) * 2;
    if (pair >= half) continue;
    low[s] = *reinterpret_cast<const Pair*>(source + pair);
    high[s] = *reinterpret_cast<const Pair*>(source + half + pair);
  }
  if (is_v) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int pair = (s * 32 + lane) * 2;
      if (pair >= half) continue;
      *reinterpret_cast<Pair*>(target + pair) = low[s];
      *reinterpret_cast<Pair*>(target + half + pair) = high[s];
    }
    return;
  }
  const T* weight = static_cast<const T*>(is_q ? p.q_norm : p.k_norm);
  float inverse_rms = 1.0f;
  if (weight != nullptr) {
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
    inverse_rms = rsqrtf(warp_sum(squares) / p.head_dim + p.epsilon);
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int pair = (s * 32 + lane) * 2;
    if (pair >= half) continue;
    Pair out_low, out_high;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = pair + e;
      const int axis = min(max(p.pair_axis[i], 0), 2);  // an engine builder times kernels on inputs of any content
      const int position = p.position_ids[static_cast<int64_t>(axis) * p.num_tokens + token];
      float sine, cosine;
      sincosf(static_cast<float>(position) * p.inv_freq[i], &sine, &cosine);
      float a = to_float(low[s].values[e]) * inverse_rms, b = to_float(high[s].values[e]) * inverse_rms;
      if (weight != nullptr) {
        a *= to_float(weight[i]);
        b *= to_float(weight[half + i]);
      }
      out_low.values[e] = from_float<T>(a * cosine - b * sine);
      out_high.values[e] = from_float<T>(b * cosine + a * sine);
    }
    *reinterpret_cast<Pair*>(target + pair) = out_low;
    *reinterpret_cast<Pair*>(target + half + pair) = out_high;
  }
}

inline cudaError_t launch_qk_norm_mrope(const QKNormMRopeParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return cudaSuccess;
  if (p.head_dim > 256 || p.head_dim % 4 != 0) return cudaErrorInvalidValue;
  const dim3 grid(p.num_tokens, ceil_div(p.num_heads + 2 * p.num_kv_heads, 4));
  return with_dtype(p.dtype, [&](auto t) {
    const auto kernel = p.head_dim <= 128 ? qk_norm_mrope_kernel<decltype(t), 1> : qk_norm_mrope_kernel<decltype(t), 2>;
    return launch(Overlap::kYes, kernel, grid, 128, 0, 1, stream, p);
  });
}

}  // namespace trt_eagle3
