// VisionAttention's first launch: rotates q and k, and packs q, k and v as the tensor cores read them.
//
// Idea: attention reads k and v once per block of queries, so they are brought into the order of shared memory once:
// core matrices of 8 patches by 8 channels, 128 bytes each, so that a tile is one contiguous copy and needs no swizzle.
// Every frame begins with a core matrix of its own; what pads it is zero. After the channels comes one more chunk:
// zeros in q and k, which fills their last product; in v a column of ones, so that the weighted sum brings the
// softmax's denominator along and no thread adds up weights. Angles are float32 products, as in transformers. Bytes
// moved: about 2 * n * 3 * Hidden * sizeof(T). Measured: docs/measurements.md, "Images".
#pragma once

#include "common.cuh"

namespace trt_eagle3 {

constexpr int kCorePatches = 8;  // rows of a core matrix
constexpr int kCoreBytes = 128;  // and its bytes, of 16-bit values
constexpr int kMaxVisionHeadDim = 128;

// q, k and v as [heads, groups, head_dim / 8 + 1] core matrices each; a group is 8 patches.
struct PackedVision {
  char* q;
  char* k;
  char* v;
  int groups;  // as many as any frame_starts of these sizes can need
};

constexpr int group_bytes(int head_dim) { return (head_dim / 8 + 1) * kCoreBytes; }

__host__ __device__ inline int vision_groups(const VisionAttentionParams& p) {
  return ceil_div(p.num_patches, kCorePatches) + p.num_frames;
}

// The frame that holds tile `tile` of `rows` patches, counted over all frames; length 0 where there is none.
struct VisionFrame {
  int start;   // its first patch
  int length;  // patches
  int tile;    // which of its own tiles
  int group;   // core-matrix groups of the frames before it
};

// Called by whole warps; the same in each. What frame_starts holds is clamped to the patches and to the packed groups
// that there are: an engine builder times on inputs of any content.
__device__ __forceinline__ VisionFrame find_frame(const VisionAttentionParams& p, int tile, int rows) {
  const int lane = threadIdx.x % 32;
  int tiles_before = 0, groups_before = 0;
  for (int base = 0; base < p.num_frames; base += 32) {
    const int frame = base + lane;
    int start = 0, length = 0;
    if (frame < p.num_frames) {
      start = min(max(p.frame_starts[frame], 0), p.num_patches);
      length = min(max(p.frame_starts[frame + 1], start), p.num_patches) - start;
    }
    int tiles = ceil_div(length, rows), groups = ceil_div(length, kCorePatches);
    const int own_tiles = tiles, own_groups = groups;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      const int t = __shfl_up_sync(0xffffffffu, tiles, offset), g = __shfl_up_sync(0xffffffffu, groups, offset);
      tiles += lane >= offset ? t : 0;
      groups += lane >= offset ? g : 0;
    }
    const unsigned reached = __ballot_sync(0xffffffffu, tile < tiles_before + tiles);
    if (reached != 0) {
      const int owner = __ffs(reached) - 1;
      VisionFrame found;
      found.start = __shfl_sync(0xffffffffu, start, owner);
      found.length = __shfl_sync(0xffffffffu, length, owner);
      found.tile = tile - tiles_before - __shfl_sync(0xffffffffu, tiles - own_tiles, owner);
      found.group = groups_before + __shfl_sync(0xffffffffu, groups - own_groups, owner);
      found.length = min(found.length, max(vision_groups(p) - found.group, 0) * kCorePatches);
      return found.tile * rows < found.length ? found : VisionFrame{};
    }
    tiles_before += __shfl_sync(0xffffffffu, tiles, 31);
    groups_before += __shfl_sync(0xffffffffu, groups, 31);
  }
  return {};
}

constexpr int kPackThreads = 256;

// grid (groups): 8 patches of one frame, all heads.
template <typename T>
__global__ void __launch_bounds__(kPackThreads)
    vision_pack_kernel(const VisionAttentionParams p, const PackedVision packed) {
  using Half = Pack<T, 4>;                                       // 8 bytes
  using Whole = Pack<T, 8>;                                      // a row of a core matrix
  __shared__ float2 turns[kCorePatches][kMaxVisionHeadDim / 2];  // cosine, sine
  wait_for_previous();
  const int group = blockIdx.x;
  const VisionFrame frame = find_frame(p, group, kCorePatches);
  if (frame.length == 0) return;
  const int first = frame.start + frame.tile * kCorePatches;
  const int count = min(kCorePatches, frame.length - frame.tile * kCorePatches);
  const int half = p.head_dim / 2, units = half / 4, whole = p.head_dim / 8;

  for (int i = threadIdx.x; i < count * half; i += kPackThreads) {
    const int patch = i / half, pair = i - patch * half;
    const int axis = min(max(p.pair_axis[pair], 0), 1);
    const int position = p.rope_positions[static_cast<int64_t>(axis) * p.num_patches + first + patch];
    float sine, cosine;
    sincosf(static_cast<float>(position) * p.inv_freq[pair], &sine, &cosine);
    turns[patch][pair] = make_float2(cosine, sine);
  }
  __syncthreads();

  const T* qkv = static_cast<const T*>(p.qkv);
  const int64_t row_size = int64_t{3} * p.num_heads * p.head_dim;
  const auto core_row = [&](char* plane, int head, int chunk, int patch) {
    const int64_t core = (static_cast<int64_t>(head) * packed.groups + group) * (whole + 1) + chunk;
    return plane + core * kCoreBytes + patch * 16;
  };
  // The patch varies fastest: eight threads write the 128 bytes of a core matrix, in halves.
  for (int i = threadIdx.x; i < 2 * p.num_heads * units * kCorePatches; i += kPackThreads) {
    const int patch = i % kCorePatches, unit = i / kCorePatches % units, slot = i / (kCorePatches * units);
    const int channel = unit * 4, head = slot % p.num_heads;
    char* plane = slot < p.num_heads ? packed.q : packed.k;
    Half low = {}, high = {}, turned_low = {}, turned_high = {};
    if (patch < count) {
      const T* source = qkv + (first + patch) * row_size + static_cast<int64_t>(slot) * p.head_dim + channel;
      low = *reinterpret_cast<const Half*>(source);
      high = *reinterpret_cast<const Half*>(source + half);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 turn = turns[patch][channel + e];
        const float a = to_float(low.values[e]), b = to_float(high.values[e]);
        turned_low.values[e] = from_float<T>(a * turn.x - b * turn.y);
        turned_high.values[e] = from_float<T>(b * turn.x + a * turn.y);
      }
    }
    *reinterpret_cast<Half*>(core_row(plane, head, channel / 8, patch) + channel % 8 * 2) = turned_low;
    const int other = half + channel;
    *reinterpret_cast<Half*>(core_row(plane, head, other / 8, patch) + other % 8 * 2) = turned_high;
  }
  for (int i = threadIdx.x; i < p.num_heads * whole * kCorePatches; i += kPackThreads) {
    const int patch = i % kCorePatches, chunk = i / kCorePatches % whole, head = i / (kCorePatches * whole);
    Whole value = {};
    if (patch < count) {
      const int64_t slot = 2 * p.num_heads + head;
      value = *reinterpret_cast<const Whole*>(qkv + (first + patch) * row_size + slot * p.head_dim + chunk * 8);
    }
    *reinterpret_cast<Whole*>(core_row(packed.v, head, chunk, patch)) = value;
  }
  for (int i = threadIdx.x; i < 3 * p.num_heads * kCorePatches; i += kPackThreads) {
    const int patch = i % kCorePatches, slot = i / kCorePatches;
    char* plane = slot < p.num_heads ? packed.q : slot < 2 * p.num_heads ? packed.k : packed.v;
    Whole value = {};
    if (plane == packed.v && patch < count) value.values[0] = from_float<T>(1.0f);
    *reinterpret_cast<Whole*>(core_row(plane, slot % p.num_heads, whole, patch)) = value;
  }
}

}  // namespace trt_eagle3
