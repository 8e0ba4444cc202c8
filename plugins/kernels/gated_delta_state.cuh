// GatedDelta, second part of a chunk: the state of a block's columns, in registers from the first row to the last.
#pragma once

#include "gated_delta_block.cuh"

namespace trt_eagle3 {

// A warp has 32 columns, a line of memory, of 32 channels, so that every move is of whole lines: lane 8 g + c has
// columns 4 c to 4 c + 3 of channels 4 g to 4 g + 3 and 16 + 4 g to 16 + 4 g + 3. Four warps are a group: all channels.
struct DeltaState {
  float values[8][4];

  static __device__ __forceinline__ int part() { return threadIdx.x / 32 % kDeltaParts; }
  static __device__ __forceinline__ int channel(int r) {
    return part() * 32 + r / 4 * 16 + threadIdx.x % 32 / 8 * 4 + r % 4;
  }
  // Of the block's.
  static __device__ __forceinline__ int column() {
    return threadIdx.x / (32 * kDeltaParts) * kDeltaGroup + threadIdx.x % 8 * 4;
  }

  // `head`: [Dk, Dv] of an entry, from the block's first column on, of which there are `columns`. Nothing of it is read
  // again soon.
  __device__ __forceinline__ void load(const float* head, int key_dim, int value_dim, int columns) {
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const bool there = channel(r) < key_dim && column() < columns;
      const auto* source = reinterpret_cast<const float4*>(head + channel(r) * value_dim + column());
      const float4 row = there ? __ldcs(source) : float4{};
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
      __stcs(reinterpret_cast<float4*>(head + channel(r) * value_dim + column()),
             make_float4(values[r][0], values[r][1], values[r][2], values[r][3]));
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
  __device__ __forceinline__ void multiply(const float* x, float* sums) const {
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

  // S += x y^T; `y`: of this lane's columns.
  __device__ __forceinline__ void add(const float* x, const float (&y)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float left[4];
      load4(x + channel(4 * half), left);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int c = 0; c < 4; ++c) values[4 * half + r][c] += left[r] * y[c];
      }
    }
  }

  // Over the four lanes with the same columns: the first kCount / 4 of `sums` are then the whole of those from
  // (lane / 8 % 2 * 2 + lane / 16) * kCount / 4 on.
  template <int kCount>
  static __device__ __forceinline__ void share(float (&sums)[kCount]) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int distance = 8 << step, half = kCount >> (step + 1);
      const bool upper = (threadIdx.x & distance) != 0;
#pragma unroll
      for (int e = 0; e < kCount / 2; ++e) {
        if (e >= half) continue;
        const float given = upper ? sums[e] : sums[e + half], kept = upper ? sums[e + half] : sums[e];
        sums[e] = kept + __shfl_xor_sync(0xffffffffu, given, distance);
      }
    }
  }
};

// What a block does with a chunk's rows, once they are there.
struct DeltaRule {
  const GatedDeltaParams& p;
  const DeltaBlock& b;
  const DeltaShared& s;
  DeltaState& state;

  // What the state before the chunk says: beta * (v - exp(G) * k S) in update, exp(G) * q S in found. Ends with a
  // barrier.
  __device__ __forceinline__ void read_state(int count) const {
#pragma unroll 1
    for (int first = 0; first < count; first += kDeltaPass) {
      const int rows = min(kDeltaPass, count - first);
      multiply(first, rows);
      __syncthreads();
      add_parts(first, rows);
      __syncthreads();
    }
  }

  // u and o of a warp's 8 columns, row by row: lane 8 r + c has column c and every fourth row above. s.rule and
  // s.attention are there.
  __device__ __forceinline__ void solve(int count) const {
    const int lane = threadIdx.x % 32, column = lane % kDeltaColumns, part = lane / kDeltaColumns;
    const int pitch = DeltaShared::round4(p.rows_at_once);
    float* update = s.update + threadIdx.x / 32 * p.rows_at_once * kDeltaColumns;
    float* found = s.found + threadIdx.x / 32 * p.rows_at_once * kDeltaColumns;
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

  // The state after row `end` - 1 from that after row `begin` - 1, along a run of rows. A barrier stands before it.
  __device__ __forceinline__ void advance(int begin, int end) const {
    if (end <= begin) return;
    const float after = s.decay[end - 1];
    const float* update = s.update + s.place(0, DeltaState::column());
    state.scale(expf(begin > 0 ? after - s.decay[begin - 1] : after));
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      const float left = expf(after - s.decay[i]);
      float y[4];
      load4(update + i * kDeltaColumns, y);
#pragma unroll
      for (int c = 0; c < 4; ++c) y[c] *= left;
      state.add(s.key + i * kDeltaDepth, y);
    }
  }

 private:
  // This warp's channels of k S and q S of some rows, in s.parts.
  __device__ __forceinline__ void multiply(int first, int rows) const {
    const int lane = threadIdx.x % 32, of_q = lane / 8 % 2, pair = lane / 16;
#pragma unroll 1
    for (int i = 0; i < rows; ++i) {
      float sums[8] = {};
      state.multiply(s.key + (first + i) * kDeltaDepth, sums);
      state.multiply(s.query + (first + i) * kDeltaDepth, sums + 4);
      DeltaState::share(sums);
      float* part = s.parts + ((DeltaState::part() * kDeltaPass + i) * 2 + of_q) * kDeltaWidth;
      *reinterpret_cast<float2*>(part + DeltaState::column() + 2 * pair) = make_float2(sums[0], sums[1]);
    }
  }

  __device__ __forceinline__ void add_parts(int first, int rows) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * kDeltaWidth; i += blockDim.x) {
      const int row = i / kDeltaWidth, column = i % kDeltaWidth, place = s.place(first + row, column);
      if (column >= b.columns) continue;
      const float* parts = s.parts + row * 2 * kDeltaWidth + column;
      float of_k = 0.0f, of_q = 0.0f;
#pragma unroll
      for (int part = 0; part < kDeltaParts; ++part) {
        of_k += parts[part * kDeltaPass * 2 * kDeltaWidth];
        of_q += parts[(part * kDeltaPass * 2 + 1) * kDeltaWidth];
      }
      const float left = expf(s.decay[first + row]);
      s.update[place] = s.beta[first + row] * (s.update[place] - left * of_k);
      s.found[place] = left * of_q;
    }
  }
};

}  // namespace trt_eagle3
