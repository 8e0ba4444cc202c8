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
      float taps[kDeltaTaps];
#pragma unroll
      for (int tap = 0; tap < kDeltaTaps; ++tap) {  // all in flight before the first is kept
        const bool there = channel >= 0 && tap < p.taps;
        taps[tap] = there ? to_float(weight[static_cast<int64_t>(channel) * p.taps + tap]) : 0.0f;
      }
#pragma unroll
      for (int tap = 0; tap < kDeltaTaps; ++tap) {
        if (tap < p.taps) s.weight[tap * width + i] = taps[tap];
      }
    }
  }

  // Rows after which the state is written.
  __device__ __forceinline__ int certain() const { return min(max(p.certain[b.sequence], 0), p.num_new); }

  // The rows that the convolution of the first row after `certain` ones sees, by the last warps first: the first ones
  // have more of the convolution to do.
  __device__ __forceinline__ void write_window(int read) const {
    const int write = p.state_writes[b.sequence], certain = this->certain();
    const int first = b.first_of_key_head ? 0 : 2 * kDeltaDepth, packs = (2 * kDeltaDepth + b.columns - first) / 4;
#pragma unroll 1
    for (int i = blockDim.x - 1 - threadIdx.x; i < kDeltaWidth * (p.taps - 1); i += blockDim.x) {
      const int w = i / kDeltaWidth, pack = i % kDeltaWidth, channel = pack < packs ? channel_of(first + pack * 4) : -1;
      if (channel < 0) continue;
      T* window = static_cast<T*>(p.conv_state) + (static_cast<int64_t>(write) * (p.taps - 1) + w) * p.channels;
      *reinterpret_cast<Quad<T>*>(window + channel) = load_quad(source(read, certain + w - (p.taps - 1), channel));
    }
  }

  // q, k, v, g and beta of rows [start, start + count), a task of one of them by a warp: each waits for memory once. A
  // barrier of the block follows.
  __device__ __forceinline__ void convolve(int read, int start, int count) const {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32, tasks = 3 * count + ceil_div(count, 32);
#pragma unroll 1
    for (int task = threadIdx.x / 32; task < tasks; task += warps) {
      if (task < 3 * count) {
        convolve_row(read, start, task / 3, lane * 4, task % 3);
      } else {
        const int i = (task - 3 * count) * 32 + lane;
        if (i < count) gates(start + i, i);
      }
    }
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

  // The same of a step's few rows: a warp has a pair of them, and hardly a register beside the state's.
  __device__ __forceinline__ void meet_in_pairs(int count) const {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32, pairs = count * (count + 1) / 2;
    int i = 0;
#pragma unroll 1
    for (int pair = threadIdx.x / 32; pair < pairs; pair += warps) {
      while ((i + 1) * (i + 2) / 2 <= pair) ++i;
      const int j = pair - i * (i + 1) / 2;
      float left[4], right[4], of_k = 0.0f, of_q = 0.0f;
      load4(s.key + j * kDeltaDepth + lane * 4, right);
      load4(s.key + i * kDeltaDepth + lane * 4, left);
#pragma unroll
      for (int e = 0; e < 4; ++e) of_k += left[e] * right[e];
      load4(s.query + i * kDeltaDepth + lane * 4, left);
#pragma unroll
      for (int e = 0; e < 4; ++e) of_q += left[e] * right[e];
      of_k = warp_sum(of_k);
      of_q = warp_sum(of_q);
      if (lane == 0) store_pair(i, j, of_k, of_q);
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

  __device__ __forceinline__ const T* source(int read, int place, int channel) const {
    return delta_source<T>(p, b.sequence, read, place, channel);
  }

  // silu of the convolution of four channels of a row, of which `offset` is the place in s.weight; the row itself is
  // kept where the block `keeps` it. Four taps are in flight at once.
  __device__ __forceinline__ void mix(int read, int place, int channel, int offset, bool keeps,
                                      float (&mixed)[4]) const {
    const int width = 2 * kDeltaDepth + b.columns;
    float total[4] = {};
    int at = place;
#pragma unroll 1
    for (int last = p.taps - 1; last >= 0; last -= 4) {
      Quad<T> rows[4];
#pragma unroll
      for (int back = 0; back < 4; ++back) {
        if (back <= last) rows[back] = load_quad(source(read, at, channel));
        at = paths.above(at);
      }
      if (last == p.taps - 1 && keeps && place < p.kept) {
        T* kept = static_cast<T*>(p.conv_rows) + (static_cast<int64_t>(b.sequence) * p.kept + place) * p.channels;
        *reinterpret_cast<Quad<T>*>(kept + channel) = rows[0];
      }
#pragma unroll
      for (int back = 0; back < 4; ++back) {
        if (back > last) continue;
        float row[4], weight[4];
        unpack<T>(rows[back], row);
        load4(s.weight + (last - back) * width + offset, weight);
#pragma unroll
        for (int e = 0; e < 4; ++e) total[e] += row[e] * weight[e];
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) mixed[e] = rounded<T>(silu<T>(rounded<T>(total[e])));
  }

  // Four channels from `own` on of q (kind 0), k (1) or v (2).
  __device__ __forceinline__ void convolve_row(int read, int start, int i, int own, int kind) const {
    const int first = kind == 0 ? query_channel(p, b) : kind == 1 ? key_channel(p, b) : value_channel(p, b);
    const bool there = own < (kind < 2 ? p.key_dim : min(b.columns, p.value_dim - b.first_column));
    float x[4] = {};
    if (there) mix(read, start + i, first + own, kind * kDeltaDepth + own, kind == 2 || b.first_of_key_head, x);
    float* kept = there && start + i < p.kept ? delta_row(p, b.sequence, start + i) : nullptr;
    if (kind < 2) return keep_unit(i, own, kind == 1, x, kept);
    if (kept != nullptr) keep4(kept + p.num_k_heads * p.key_dim + b.head * p.value_dim + b.first_column + own, x);
    if (own < b.columns) store4(s.update + s.place(i, own), x);
  }

  // A head of k or q, of length 1 and Dk^-1/2, by a warp.
  __device__ __forceinline__ void keep_unit(int i, int own, bool of_k, float (&x)[4], float* kept) const {
    make_unit(x, of_k ? 1.0f : rsqrtf(static_cast<float>(p.key_dim)));
    store4((of_k ? s.key : s.query) + i * kDeltaDepth + own, x);
    if (of_k && b.first_of_key_head && kept != nullptr) keep4(kept + b.key_head * p.key_dim + own, x);
  }

  __device__ __forceinline__ void gates(int place, int i) const {
    const DeltaGates own = DeltaGates::of<T>(p, b.sequence, place, b.head);
    s.beta[i] = own.beta;
    s.gate[i] = own.g;
    if (blockIdx.x == 0 && place < p.kept) own.keep(p, b.sequence, place, b.head);
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
      const float left = decay(row, column) * sums[e];
      if (index < 8) {
        s.rule[row * pitch + column] = s.beta[row] * left;
      } else {
        s.attention[row * pitch + column] = left;
      }
    }
  }

  __device__ __forceinline__ void store_pair(int row, int column, float of_k, float of_q) const {
    const int place = row * DeltaShared::round4(p.rows_at_once) + column;
    const float left = decay(row, column);
    s.rule[place] = s.beta[row] * left * of_k;
    s.attention[place] = left * of_q;
  }

  // Of what row `column` left, at row `row`.
  __device__ __forceinline__ float decay(int row, int column) const {
    return paths.sees(row, column) ? expf(s.decay[row] - s.decay[column]) : 0.0f;
  }
};

}  // namespace trt_eagle3
