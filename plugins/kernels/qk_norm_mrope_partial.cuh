// QKNormMRope of heads of which only the first 2 P channels turn (channel i with i + P), or whose norms' weights are
// stored less an offset.
//
// Idea: a warp owns a head of a token and normalises it in shared memory, where every channel finds its partner
// whatever P is. Bytes moved: 2 * N * (Hq + 2 Hkv) * D * sizeof(T).
#pragma once

#include "qk_norm_mrope.cuh"

namespace trt_eagle3 {

constexpr int kPartialRopeWarps = 4;
constexpr int kPartialRopeDim = 256;  // channels of a head at most

// grid (N, heads / kPartialRopeWarps)
template <typename T>
__global__ void __launch_bounds__(32 * kPartialRopeWarps) qk_norm_mrope_partial_kernel(const QKNormMRopeParams p) {
  __shared__ float channels[kPartialRopeWarps][kPartialRopeDim];
  wait_for_previous_beside_next();
  const int num_heads = p.num_heads + 2 * p.num_kv_heads, rotated = num_heads - p.num_kv_heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y * kPartialRopeWarps + warp;
  if (head >= num_heads) return;
  const int64_t token = blockIdx.x;
  const T* source = static_cast<const T*>(p.qkv) + (token * num_heads + head) * p.head_dim;
  T* target = rope_target<T>(p, token, head);
  if (head >= rotated) {
    for (int c = lane; c < p.head_dim; c += 32) target[c] = source[c];
    return;
  }
  float squares = 0.0f;
  for (int c = lane; c < p.head_dim; c += 32) squares += to_float(source[c]) * to_float(source[c]);
  const T* weight = static_cast<const T*>(head < p.num_heads ? p.q_norm : p.k_norm);
  const float scale = weight == nullptr ? 1.0f : rsqrtf(warp_sum(squares) / p.head_dim + p.epsilon);
  for (int c = lane; c < p.head_dim; c += 32) {
    const float factor = weight == nullptr ? 1.0f : to_float(weight[c]) + p.weight_offset;
    channels[warp][c] = to_float(source[c]) * scale * factor;
  }
  __syncwarp();
  for (int c = lane; c < p.head_dim; c += 32) {
    float value = channels[warp][c];
    if (c < 2 * p.num_pairs) {
      const bool low = c < p.num_pairs;
      const int pair = low ? c : c - p.num_pairs;
      const int axis = min(max(p.pair_axis[pair], 0), 2);  // an engine builder times kernels on inputs of any content
      const int position = p.position_ids[static_cast<int64_t>(axis) * p.num_tokens + token];
      float sine, cosine;
      sincosf(static_cast<float>(position) * p.inv_freq[pair], &sine, &cosine);
      const float other = channels[warp][low ? c + p.num_pairs : c - p.num_pairs];
      value = low ? value * cosine - other * sine : value * cosine + other * sine;
    }
    target[c] = from_float<T>(value);
  }
}

template <typename T>
cudaError_t launch_qk_norm_mrope_partial(const QKNormMRopeParams& p, cudaStream_t stream) {
  const dim3 grid(p.num_tokens, ceil_div(p.num_heads + 2 * p.num_kv_heads, kPartialRopeWarps));
  return launch(Overlap::kYes, qk_norm_mrope_partial_kernel<T>, grid, 32 * kPartialRopeWarps, 0, 1, stream, p);
}

}  // namespace trt_eagle3
