// GatedDelta, second part of a chunk: the state of a warp's columns, in registers from the first row to the last.
#pragma once

#include "gated_delta_block.cuh"

namespace trt_eagle3 {

// Lane 2 g + h has columns 4 h to 4 h + 3 of channels 4 g to 4 g + 3 and 64 + 4 g to 64 + 4 g + 3.
struct DeltaState {
  float values[8][4];

  static __device__ __forceinline__ int channel(int r) { return r / 4 * 64 + threadIdx.x % 32 / 2 * 4 + r % 4; }
  static __device__ __forceinline__ int column() { return threadIdx.x % 2 * 4; }

  // `head`: [Dk, Dv] of an entry, from the warp's first column on, of which there are `columns`.
  __device__ __forceinline__ void load(const float* head, int key_dim, int value_dim, int columns) {
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const bool there = channel(r) < key_dim && column() < columns;
      const float4 row = there ? *reinterpret_cast<const float4*>(head + channel(r) * value_dim + column()) : float4{};
      values[r][0] = row.x;
      values[r][1] = row.y;
      values[r][2] = row.z;
      values[r][3] = row.w;
    }
  }

  __device__ __forceinline__ void store(float* head, int key_dim, int value_dim, int columns) const {
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      if (channel(r) >= key_dim || column() >= columns) continue;
      *reinterpret_cast<float4*>(head + channel(r) * value_dim + column()) =
          make_float4(values[r][0], values[r][1], values[r][2], values[r][3]);
    }
  }

  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int r = 0; r < 8; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) values[r][c] *= factor;
    }
  }

  // sums[c] += this lane's part of x . S, for its columns; `x`: [kDeltaDepth].
  __device__ __forceinline__ void multiply(const float* x, float (&sums)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float part[4];
      load4(x + channel(4 * half), part);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[c] += part[r] * values[4 * half + r][c];
      }
    }
  }

  // S += x y^T; `y`: the warp's columns.
  __device__ __forceinline__ void add(const float* x, const float* y) {
    float right[4];
    load4(y + column(), right);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float left[4];
      load4(x + channel(4 * half), left);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int c = 0; c < 4; ++c) values[4 * half + r][c] += left[r] * right[c];
      }
    }
  }

  // Of each of 2 x 4 numbers (of k, of q) of a lane, the sum over the 16 lanes with the same columns: in lanes 0 to 15
  // that of number lane / 2 % 8, of columns 4 * (lane % 2) on.
  static __device__ __forceinline__ float sum_of_eight(float (&sums)[8]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 4; half >= 1; half /= 2) {
      const int distance = 2 * half;
      const bool upper = (lane & distance) != 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (e >= half) continue;
        const float given = upper ? sums[e] : sums[e + half], kept = upper ? sums[e + half] : sums[e];
        sums[e] = kept + __shfl_xor_sync(0xffffffffu, given, distance);
      }
    }
    return sums[0] + __shfl_xor_sync(0xffffffffu, sums[0], 16);
  }
};

// What a warp does with a chunk's rows, once they are there; nothing here waits for another warp but where said.
struct DeltaRule {
  const GatedDeltaParams& p;
  const DeltaShared& s;
  DeltaState& state;
  float* update;  // [rows, kDeltaColumns]: v, then u
  float* found;   // [rows, kDeltaColumns]: o

  __device__ __forceinline__ DeltaRule(const GatedDeltaParams& params, const DeltaShared& shared, DeltaState& own)
      : p(params),
        s(shared),
        state(own),
        update(shared.update + threadIdx.x / 32 * params.rows_at_once * kDeltaColumns),
        found(shared.found + threadIdx.x / 32 * params.rows_at_once * kDeltaColumns) {}

  // What the state before the chunk says: beta * (v - exp(G) * k S) in update, exp(G) * q S in found.
  __device__ __forceinline__ void read_state(int count) const {
    const int lane = threadIdx.x % 32, number = lane / 2 % 8;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      float of_k[4] = {}, of_q[4] = {};
      state.multiply(s.key + i * kDeltaDepth, of_k);
      state.multiply(s.query + i * kDeltaDepth, of_q);
      float sums[8] = {of_k[0], of_k[1], of_k[2], of_k[3], of_q[0], of_q[1], of_q[2], of_q[3]};
      const float said = DeltaState::sum_of_eight(sums) * expf(s.decay[i]);
      if (lane >= 16) continue;
      const int place = i * kDeltaColumns + DeltaState::column() + number % 4;
      if (number < 4) {
        update[place] = s.beta[i] * (update[place] - said);
      } else {
        found[place] = said;
      }
    }
    __syncwarp();
  }

  // u and o, row by row: lane 8 r + c has column c and every fourth row above. s.rule and s.attention are there.
  __device__ __forceinline__ void solve(int count) const {
    const int lane = threadIdx.x % 32, column = lane % kDeltaColumns, part = lane / kDeltaColumns;
    const int pitch = DeltaShared::round4(p.rows_at_once);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const float* rule = s.rule + i * pitch;
      const float* attention = s.attention + i * pitch;
      float known = 0.0f, seen = 0.0f;
#pragma unroll 4
      for (int j = part; j < i; j += 4) {
        const float u = update[j * kDeltaColumns + column];
        known += rule[j] * u;
        seen += attention[j] * u;
      }
#pragma unroll
      for (int distance = 8; distance <= 16; distance *= 2) {
        known += __shfl_xor_sync(0xffffffffu, known, distance);
        seen += __shfl_xor_sync(0xffffffffu, seen, distance);
      }
      if (part == 0) {
        const int place = i * kDeltaColumns + column;
        const float u = update[place] - known;
        update[place] = u;
        found[place] += seen + attention[i] * u;
      }
      __syncwarp();
    }
  }

  // The state after row `end` - 1 from that after row `begin` - 1, along a run of rows; u is not what it was after it.
  __device__ __forceinline__ void advance(int begin, int end) const {
    if (end <= begin) return;
    const float after = s.decay[end - 1];
    for (int i = begin * kDeltaColumns + threadIdx.x % 32; i < end * kDeltaColumns; i += 32) {
      update[i] *= expf(after - s.decay[i / kDeltaColumns]);
    }
    __syncwarp();
    state.scale(expf(begin > 0 ? after - s.decay[begin - 1] : after));
#pragma unroll 2
    for (int i = begin; i < end; ++i) state.add(s.key + i * kDeltaDepth, update + i * kDeltaColumns);
  }
};

}  // namespace trt_eagle3
