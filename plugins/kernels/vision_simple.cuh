// VisionAttention for float32 and for head_dims that the tensor-core kernels lack: a thread owns a query.
//
// Idea: 128 queries of a head pass over tiles of keys and values in shared memory, rotated as they are loaded; all
// threads read one key at a time, so shared memory broadcasts. Sums in float32; no workspace.
#pragma once

#include "vision_pack.cuh"

namespace trt_eagle3 {

constexpr int kSimpleRows = 128;
constexpr int kSimpleTokens = 16;

// Channel `channel` of a rotated q (slot 0) or k (slot 1), rounded to T as the other paths round it.
template <typename T>
__device__ __forceinline__ float rotated(const VisionAttentionParams& p, int64_t patch, int slot, int head,
                                         int channel) {
  const int half = p.head_dim / 2, pair = channel < half ? channel : channel - half;
  const T* row = static_cast<const T*>(p.qkv) + ((patch * 3 + slot) * p.num_heads + head) * p.head_dim;
  const int axis = min(max(p.pair_axis[pair], 0), 1);
  const int position = p.rope_positions[static_cast<int64_t>(axis) * p.num_patches + patch];
  float sine, cosine;
  sincosf(static_cast<float>(position) * p.inv_freq[pair], &sine, &cosine);
  const float low = to_float(row[pair]), high = to_float(row[pair + half]);
  return to_float(from_float<T>(channel < half ? low * cosine - high * sine : high * cosine + low * sine));
}

// Loads rotated rows `first` .. of a frame into a tile, zeros past its end and past head_dim.
template <typename T, int kMaxDim>
__device__ __forceinline__ void load_rotated(const VisionAttentionParams& p, const VisionFrame& frame, int first,
                                             int slot, int head, float (&tile)[kSimpleTokens][kMaxDim]) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kSimpleTokens * kMaxDim; i += kSimpleRows) {
    const int token = i / kMaxDim, d = i % kMaxDim;
    const bool held = first + token < frame.length && d < p.head_dim;
    tile[token][d] = held ? rotated<T>(p, frame.start + first + token, slot, head, d) : 0.0f;
  }
}

// grid (tiles of kSimpleRows patches over all frames, heads); kMaxDim >= head_dim.
template <typename T, int kMaxDim>
__global__ void __launch_bounds__(kSimpleRows) vision_simple_kernel(const VisionAttentionParams p) {
  __shared__ float keys[kSimpleTokens][kMaxDim], values[kSimpleTokens][kMaxDim];
  wait_for_previous();
  const VisionFrame frame = find_frame(p, blockIdx.x, kSimpleRows);
  if (frame.length == 0) return;
  const int head = blockIdx.y, row = frame.tile * kSimpleRows + threadIdx.x, dim = p.head_dim;
  const bool real = row < frame.length;
  float query[kMaxDim], sums[kMaxDim], highest = -INFINITY, denominator = 0.0f;
#pragma unroll
  for (int d = 0; d < kMaxDim; ++d) sums[d] = 0.0f;
#pragma unroll 1
  for (int first = 0; first < kSimpleRows; first += kSimpleTokens) {
    load_rotated<T>(p, frame, frame.tile * kSimpleRows + first, 0, head, keys);
    __syncthreads();
    if (static_cast<int>(threadIdx.x) / kSimpleTokens == first / kSimpleTokens) {
#pragma unroll
      for (int d = 0; d < kMaxDim; ++d) query[d] = keys[threadIdx.x % kSimpleTokens][d] * p.scale;
    }
    __syncthreads();
  }
  for (int first = 0; first < frame.length; first += kSimpleTokens) {
    __syncthreads();
    load_rotated<T>(p, frame, first, 1, head, keys);
    for (int i = threadIdx.x; i < kSimpleTokens * kMaxDim; i += kSimpleRows) {
      const int token = i / kMaxDim, d = i % kMaxDim;
      const int64_t slot = (int64_t{3} * (frame.start + first + token) + 2) * p.num_heads + head;
      const bool held = first + token < frame.length && d < dim;
      values[token][d] = held ? to_float(static_cast<const T*>(p.qkv)[slot * dim + d]) : 0.0f;
    }
    __syncthreads();
    const int count = min(kSimpleTokens, frame.length - first);
    float scores[kSimpleTokens], tile_max = highest;
#pragma unroll
    for (int token = 0; token < kSimpleTokens; ++token) {
      float score = 0.0f;
#pragma unroll
      for (int d = 0; d < kMaxDim; ++d) score = fmaf(query[d], keys[token][d], score);
      scores[token] = token < count ? score : -INFINITY;
      tile_max = fmaxf(tile_max, scores[token]);
    }
    const float rescale = expf(highest - tile_max);
    highest = tile_max;
    denominator *= rescale;
#pragma unroll
    for (int d = 0; d < kMaxDim; ++d) sums[d] *= rescale;
#pragma unroll
    for (int token = 0; token < kSimpleTokens; ++token) {
      const float weight = expf(scores[token] - highest);
      denominator += weight;
#pragma unroll
      for (int d = 0; d < kMaxDim; ++d) sums[d] = fmaf(weight, values[token][d], sums[d]);
    }
  }
  if (!real) return;
  T* out = static_cast<T*>(p.out) + (static_cast<int64_t>(frame.start + row) * p.num_heads + head) * dim;
#pragma unroll
  for (int d = 0; d < kMaxDim; ++d) {
    if (d < dim) out[d] = from_float<T>(sums[d] / denominator);
  }
}

}  // namespace trt_eagle3
