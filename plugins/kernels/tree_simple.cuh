// TreeAttention without tensor cores: any type, any even head_dim up to 256. For float32 models and odd geometries.
//
// Idea: one launch writes the new rows into the cache; in a second, four warps share the slots of one (token, head) and
// merge at the end. No tiling: every cache row is read once per query head, through L2.
// Measured: not a target; it exists so that a float32 pair runs on CUDA and the fast path has something to be checked
// by.
#pragma once

#include "fp8.cuh"

namespace trt_eagle3 {

__device__ __forceinline__ int64_t simple_slot(const TreeAttentionParams& p, int sequence, int position) {
  const int64_t page = p.page_table[static_cast<int64_t>(sequence) * p.pages_per_row + position / p.page_size];
  return page * p.page_size + position % p.page_size;
}

// Number `i` of a cache, before its head's scale.
template <typename T, bool kFp8>
__device__ __forceinline__ float cached_float(const void* cache, int64_t i) {
  if constexpr (kFp8) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<const __nv_fp8_storage_t*>(cache)[i], __NV_E4M3)));
  } else {
    return to_float(static_cast<const T*>(cache)[i]);
  }
}

template <typename T, bool kFp8>
__device__ __forceinline__ void store_cached(void* cache, int64_t i, T value, float scale) {
  if constexpr (kFp8) {
    const float scaled = to_float(value) * __frcp_rn(scale);
    static_cast<__nv_fp8_storage_t*>(cache)[i] = __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3);
  } else {
    static_cast<T*>(cache)[i] = value;
  }
}

// grid (N)
template <typename T, bool kFp8>
__global__ void __launch_bounds__(128) tree_write_simple_kernel(const TreeAttentionParams p) {
  const int sequence = blockIdx.x / p.num_new;
  const int token = blockIdx.x - sequence * p.num_new;
  const int position = p.past_lengths[sequence] + p.tail - p.num_new + token;
  if (token >= p.query_lengths[sequence] || position >= p.pages_per_row * p.page_size) return;
  const int width = p.num_kv_heads * p.head_dim;
  const int64_t target = simple_slot(p, sequence, position) * width;
  const int64_t source = static_cast<int64_t>(blockIdx.x) * width;
  for (int i = threadIdx.x; i < width; i += 128) {
    const int kv_head = i / p.head_dim;
    store_cached<T, kFp8>(p.k_cache, target + i, static_cast<const T*>(p.k)[source + i], kv_scale<kFp8>(p, 0, kv_head));
    store_cached<T, kFp8>(p.v_cache, target + i, static_cast<const T*>(p.v)[source + i], kv_scale<kFp8>(p, 1, kv_head));
  }
}

// grid (N, Hq)
template <typename T, bool kFp8>
__global__ void __launch_bounds__(128) tree_simple_kernel(const TreeAttentionParams p) {
  constexpr int kWarps = 4, kMax = 8;  // 8 x 32 columns
  __shared__ float outs[kWarps][kMax * 32];
  __shared__ float warp_m[kWarps], warp_d[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int sequence = blockIdx.x / p.num_new;
  const int token = blockIdx.x - sequence * p.num_new;
  const int head = blockIdx.y;
  const int kv_head = head / (p.num_heads / p.num_kv_heads);
  const int past = p.past_lengths[sequence];
  const int queries = min(p.query_lengths[sequence], p.num_new);
  const int first_new = past + p.tail - p.num_new;
  const bool causal = p.mask == MaskKind::kCausal;
  T* out = static_cast<T*>(p.out) + (static_cast<int64_t>(blockIdx.x) * p.num_heads + head) * p.head_dim;
  if (token >= queries) {
    for (int i = threadIdx.x; i < p.head_dim; i += 128) out[i] = from_float<T>(0.0f);
    return;
  }
  const T* q = static_cast<const T*>(p.q) + (static_cast<int64_t>(blockIdx.x) * p.num_heads + head) * p.head_dim;
  const uint8_t* mask = p.tree_mask + static_cast<int64_t>(blockIdx.x) * p.tail;
  const float scale = p.scale * kv_scale<kFp8>(p, 0, kv_head), v_scale = kv_scale<kFp8>(p, 1, kv_head);
  float query[kMax], acc[kMax] = {};
#pragma unroll
  for (int i = 0; i < kMax; ++i) query[i] = i * 32 + lane < p.head_dim ? to_float(q[i * 32 + lane]) * scale : 0.0f;
  float m = -INFINITY, d = 0.0f;
  int begin = 0, end = min(causal ? first_new + token + 1 : first_new + queries, p.pages_per_row * p.page_size);
  if (p.window > 0) {
    begin = max(first_new + token - p.window + 1, 0);
    end = min(end, first_new + token + p.window);
  } else if (p.anchor_window > 0) {
    begin = max(past - p.anchor_window, 0);
  }
  for (int position = begin + warp; position < end; position += kWarps) {
    if (!causal && position >= past && mask[position - past] == 0) continue;
    const int64_t row = (simple_slot(p, sequence, position) * p.num_kv_heads + kv_head) * p.head_dim;
    float value[kMax], score = 0.0f;
#pragma unroll
    for (int i = 0; i < kMax; ++i) {
      const bool inside = i * 32 + lane < p.head_dim;
      value[i] = inside ? cached_float<T, kFp8>(p.v_cache, row + i * 32 + lane) : 0.0f;
      if (inside) score += query[i] * cached_float<T, kFp8>(p.k_cache, row + i * 32 + lane);
    }
    score = warp_sum(score);
    const float new_m = fmaxf(m, score);
    const float rescale_by = expf(m - new_m), weight = expf(score - new_m);
    m = new_m;
    d = d * rescale_by + weight;
#pragma unroll
    for (int i = 0; i < kMax; ++i) acc[i] = acc[i] * rescale_by + weight * value[i];
  }
#pragma unroll
  for (int i = 0; i < kMax; ++i) outs[warp][i * 32 + lane] = acc[i];
  if (lane == 0) {
    warp_m[warp] = m;
    warp_d[warp] = d;
  }
  __syncthreads();
  float final_m = -INFINITY;
  for (int w = 0; w < kWarps; ++w) final_m = fmaxf(final_m, warp_m[w]);
  float final_d = 0.0f, weights[kWarps];
  for (int w = 0; w < kWarps; ++w) {
    weights[w] = warp_m[w] == -INFINITY ? 0.0f : expf(warp_m[w] - final_m);
    final_d += weights[w] * warp_d[w];
  }
  for (int i = threadIdx.x; i < p.head_dim; i += 128) {
    float merged = 0.0f;
    for (int w = 0; w < kWarps; ++w) merged += weights[w] * outs[w][i];
    out[i] = from_float<T>(final_d > 0.0f ? merged * v_scale / final_d : 0.0f);
  }
}

template <typename T, bool kFp8>
cudaError_t tree_simple(const TreeAttentionParams& p, cudaStream_t stream) {
  const int tokens = p.batch * p.num_new;
  tree_write_simple_kernel<T, kFp8><<<tokens, 128, 0, stream>>>(p);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  tree_simple_kernel<T, kFp8><<<dim3(tokens, p.num_heads), 128, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace trt_eagle3
