// GatedDelta, first part of a chunk: rows of q, k and v by the causal convolution, gates, and how rows meet each other.
#pragma once

#include "gated_delta_block.cuh"

namespace trt_eagle3 {

template <typename T>
struct DeltaRows {
  const GatedDeltaParams& p;
  const DeltaBlock& b;
  const DeltaShared& s;
  const DeltaPaths& paths;

  // The taps of this block's channels, as [taps, q k v]: prefetch-safe.
  __device__ __forceinline__ void load_weight() const {
    const int width = 2 * kDeltaDepth + b.columns;
    const T* weight = static_cast<const T*>(p.conv_weight);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
      const int channel = channel_of(i);
      for (int tap = 0; tap < p.taps; ++tap) {
        s.weight[tap * width + i] = channel < 0 ? 0.0f : to_float(weight[static_cast<int64_t>(channel) * p.taps + tap]);
      }
    }
  }

  // The rows that the convolution of the first row after `certain` ones sees.
  __device__ __forceinline__ void write_window(int read, int write, int certain) const {
    const int width = 2 * kDeltaDepth + b.columns;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
      const int channel = channel_of(i);
      if (channel < 0 || (i < 2 * kDeltaDepth && !b.first_of_key_head)) continue;
      T* window = static_cast<T*>(p.conv_state) + static_cast<int64_t>(write) * (p.taps - 1) * p.channels + channel;
      for (int w = 0; w < p.taps - 1; ++w) {
        window[static_cast<int64_t>(w) * p.channels] = *source(read, certain + w - (p.taps - 1), channel);
      }
    }
  }

  // q, k, v, g and beta of rows [start, start + count); a barrier of the block follows.
  __device__ __forceinline__ void convolve(int read, int start, int count) const {
    const int packs = b.columns / 4, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int i = threadIdx.x; i < count * packs; i += blockDim.x) convolve_value(read, start, i / packs, i % packs * 4);
    for (int i = threadIdx.x / 32; i < count; i += warps) {
      convolve_unit(read, start, i, lane, query_channel(p, b), 0, s.query, rsqrtf(static_cast<float>(p.key_dim)));
      convolve_unit(read, start, i, lane, key_channel(p, b), kDeltaDepth, s.key, 1.0f);
    }
    for (int i = threadIdx.x; i < count; i += blockDim.x) gates(start + i, i);
  }

  // Sums of g along paths; a barrier follows.
  __device__ __forceinline__ void sum_gates(int count) const {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      float sum = 0.0f;
#pragma unroll 4
      for (int j = 0; j <= i; ++j) sum += paths.sees(i, j) ? s.gate[j] : 0.0f;
      s.decay[i] = sum;
    }
  }

  // s.rule and s.attention of a chunk's rows: 8 lanes have 2 rows by 4, and share the channels; a barrier follows.
  __device__ __forceinline__ void meet(int count) const {
    const int group = threadIdx.x / 8, groups = blockDim.x / 8, part = threadIdx.x % 8;
    const int quads = ceil_div(count, 4), tiles = quads * (quads + 1), rounds = ceil_div(tiles, groups);
    int quad = 0;  // of rows i: before it are quad * (quad + 1) tiles
    for (int round = 0; round < rounds; ++round) {
      const int tile = min(round * groups + group, tiles - 1);
      while ((quad + 1) * (quad + 2) <= tile) ++quad;
      const int rest = tile - quad * (quad + 1);
      const int i = quad * 4 + rest / (quad + 1) * 2, j = rest % (quad + 1) * 4;
      float sums[16] = {};
      multiply(count, i, j, part, sums);
      if (round * groups + group < tiles) store_tile(count, i, j, part, sums);
    }
  }

 private:
  // -1 of what pads q, k or v.
  __device__ __forceinline__ int channel_of(int i) const {
    if (i < kDeltaDepth) return i < p.key_dim ? query_channel(p, b) + i : -1;
    if (i < 2 * kDeltaDepth) return i - kDeltaDepth < p.key_dim ? key_channel(p, b) + i - kDeltaDepth : -1;
    const int column = i - 2 * kDeltaDepth;
    return b.first_column + column < p.value_dim ? value_channel(p, b) + column : -1;
  }

  // Row `place` before the convolution: below 0 the state's.
  __device__ __forceinline__ const T* source(int read, int place, int channel) const {
    if (place < 0) {
      const int64_t row = static_cast<int64_t>(read) * (p.taps - 1) + p.taps - 1 + place;
      return static_cast<const T*>(p.conv_state) + row * p.channels + channel;
    }
    return row_of(place) + channel;
  }
  __device__ __forceinline__ const T* row_of(int place) const {
    const int64_t row = static_cast<int64_t>(b.sequence) * p.num_new + place;
    return static_cast<const T*>(p.qkvz) + row * (p.channels + p.num_v_heads * p.value_dim);
  }

  // silu of the convolution of four channels of a row, of which `offset` is the place in s.weight; the row itself is
  // kept where the block `keeps` it.
  __device__ __forceinline__ void mix(int read, int place, int channel, int offset, bool keeps, float (&mixed)[4]) const {
    const int width = 2 * kDeltaDepth + b.columns;
    float total[4] = {};
    int at = place;
#pragma unroll 4
    for (int tap = p.taps - 1; tap >= 0; --tap) {
      float row[4];
      load4(source(read, at, channel), row);
      const float* weight = s.weight + tap * width + offset;
#pragma unroll
      for (int e = 0; e < 4; ++e) total[e] += row[e] * weight[e];
      at = paths.above(at);
    }
    if (keeps && place < p.kept) {
      const Pack<T, 4> row = *reinterpret_cast<const Pack<T, 4>*>(row_of(place) + channel);
      T* kept = static_cast<T*>(p.conv_rows) + (static_cast<int64_t>(b.sequence) * p.kept + place) * p.channels;
      *reinterpret_cast<Pack<T, 4>*>(kept + channel) = row;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) mixed[e] = rounded<T>(silu<T>(rounded<T>(total[e])));
  }

  __device__ __forceinline__ float* delta_row(int place) const {
    const int width = p.num_k_heads * p.key_dim + p.num_v_heads * (p.value_dim + 2);
    return p.delta_rows + (static_cast<int64_t>(b.sequence) * p.kept + place) * width;
  }

  // One by one: a row's width need be no multiple of four.
  static __device__ __forceinline__ void keep4(float* target, const float (&values)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) target[e] = values[e];
  }

  __device__ __forceinline__ void convolve_value(int read, int start, int i, int column) const {
    float v[4] = {};
    if (b.first_column + column < p.value_dim) {
      mix(read, start + i, value_channel(p, b) + column, 2 * kDeltaDepth + column, true, v);
      if (start + i < p.kept) {
        const int place = p.num_k_heads * p.key_dim + b.head * p.value_dim + b.first_column + column;
        keep4(delta_row(start + i) + place, v);
      }
    }
    store4(s.update + (column / kDeltaColumns * p.rows_at_once + i) * kDeltaColumns + column % kDeltaColumns, v);
  }

  // A head of q or k, of `length`, by a warp.
  __device__ __forceinline__ void convolve_unit(int read, int start, int i, int lane, int channel, int offset,
                                                float* target, float length) const {
    float x[4] = {};
    if (lane * 4 < p.key_dim) mix(read, start + i, channel + lane * 4, offset + lane * 4, b.first_of_key_head, x);
    const float squares = warp_sum(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]);
    const float scale = length / sqrtf(squares + kDeltaUnitEpsilon);
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] *= scale;
    store4(target + i * kDeltaDepth + lane * 4, x);
    if (offset == kDeltaDepth && b.first_of_key_head && lane * 4 < p.key_dim && start + i < p.kept) {
      keep4(delta_row(start + i) + b.key_head * p.key_dim + lane * 4, x);
    }
  }

  __device__ __forceinline__ void gates(int place, int i) const {
    const int64_t row = static_cast<int64_t>(b.sequence) * p.num_new + place;
    const T* ba = static_cast<const T*>(p.ba) + row * 2 * p.num_v_heads + b.head;
    const float beta = rounded<T>(1.0f / (1.0f + expf(-to_float(ba[0]))));
    const float a = to_float(ba[p.num_v_heads]) + p.dt_bias[b.head];
    const float g = -expf(p.a_log[b.head]) * (a > 20.0f ? a : log1pf(expf(a)));
    s.beta[i] = beta;
    s.gate[i] = g;
    if (blockIdx.x == 0 && place < p.kept) {
      float* kept = delta_row(place) + p.num_k_heads * p.key_dim + p.num_v_heads * p.value_dim + b.head;
      kept[0] = g;
      kept[p.num_v_heads] = beta;
    }
  }

  // This lane's channels of k_i . k_j (sums[0..7], by i then j) and q_i . k_j; the rows past the last repeat it.
  __device__ __forceinline__ void multiply(int count, int i, int j, int part, float (&sums)[16]) const {
    const int last = count - 1;
#pragma unroll 1
    for (int channel = part * 4; channel < kDeltaDepth; channel += 32) {
      float left[4][4];  // k_i, k_(i+1), q_i, q_(i+1)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        load4((r < 2 ? s.key : s.query) + min(i + r % 2, last) * kDeltaDepth + channel, left[r]);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float right[4];
        load4(s.key + min(j + c, last) * kDeltaDepth + channel, right);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[r * 4 + c] += left[r][e] * right[e];
        }
      }
    }
    // Each exchange halves what a lane has: in the end lane `part` has sums 2 * part and 2 * part + 1, in 0 and 1.
#pragma unroll
    for (int half = 8; half >= 2; half /= 2) {
      const int distance = half / 2;
      const bool upper = (part & distance) != 0;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (e >= half) continue;
        const float given = upper ? sums[e] : sums[e + half], kept = upper ? sums[e + half] : sums[e];
        sums[e] = kept + __shfl_xor_sync(0xffffffffu, given, distance);
      }
    }
  }

  __device__ __forceinline__ void store_tile(int count, int i, int j, int part, const float (&sums)[16]) const {
    const int pitch = DeltaShared::round4(p.rows_at_once);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int index = 2 * part + e, row = i + index / 4 % 2, column = j + index % 4;
      if (row >= count || column > row) continue;
      const float left = paths.sees(row, column) ? expf(s.decay[row] - s.decay[column]) * sums[e] : 0.0f;
      if (index < 8) {
        s.rule[row * pitch + column] = s.beta[row] * left;
      } else {
        s.attention[row * pitch + column] = left;
      }
    }
  }
};

}  // namespace trt_eagle3
