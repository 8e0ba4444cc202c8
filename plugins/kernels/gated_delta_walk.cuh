// GatedDelta by tensor cores, second launch: the walk over a pass's chunks with 32 columns of a head's state.
//
// Idea: a warp has 16 channels of the state in registers, as sums of mma. Of each chunk V' = U - W S, o = exp(G) q S +
// (q k^T) V', S = exp(G) S + k^T (exp(G - G_i) V'); S and V' are rounded to T where they are operands, the state is not.
// The next chunk's operands are copied to shared memory under the products.
// Bytes moved: 60 KiB a chunk and block, from L2; o, rounded to T.
#pragma once

#include "gated_delta_fragments.cuh"

namespace trt_eagle3 {

// A chunk's operands in shared memory, in uint4.
struct DeltaStage {
  static constexpr int kReadout = 0, kQuery = kDeltaTall, kKey = 2 * kDeltaTall, kAttention = 3 * kDeltaTall;
  static constexpr int kUpdate = kAttention + kDeltaSquare, kUpdates = kDeltaSlice / 16 * 4 * kDeltaTile;
  static constexpr int kDecay = kUpdate + kUpdates, kDecays = kDeltaChunkRows / 4;
  static constexpr int kSize = kDecay + kDecays;
};

template <typename T>
struct DeltaWalkShared {
  static constexpr int kPitch = kDeltaSlice + 8;
  uint4* stages;  // [2, DeltaStage::kSize]
  T* state;       // [kDeltaDepth, kPitch]: S, rounded
  T* update;      // [64, kPitch]: V'
  T* decayed;     // [64, kPitch]: exp(G - G_i) V'

  static constexpr int bytes() {
    return 2 * DeltaStage::kSize * 16 + (kDeltaDepth + 2 * kDeltaChunkRows) * kPitch * static_cast<int>(sizeof(T));
  }

  __device__ __forceinline__ explicit DeltaWalkShared(char* memory)
      : stages(reinterpret_cast<uint4*>(memory)),
        state(reinterpret_cast<T*>(stages + 2 * DeltaStage::kSize)),
        update(state + kDeltaDepth * kPitch),
        decayed(update + kDeltaChunkRows * kPitch) {}
};

// grid (slices of a head, Hv, B)
template <typename T>
struct DeltaWalk {
  static constexpr int kPitch = DeltaWalkShared<T>::kPitch;
  const DeltaPass& pass;
  const DeltaWalkShared<T>& s;
  int head, sequence, slice, lane, warp;
  int tile, half;       // of the products with a chunk's rows: 16 of the rows, 16 of the columns
  float state[4][4];    // 16 channels from 16 * warp on, by 32 columns
  float update[2][4];   // V': 16 rows from 16 * tile on, by 16 columns from 16 * half on
  float found[2][4];    // q S, then o

  __device__ __forceinline__ DeltaWalk(const DeltaPass& of, const DeltaWalkShared<T>& shared)
      : pass(of),
        s(shared),
        head(blockIdx.y),
        sequence(blockIdx.z),
        slice(blockIdx.x),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        tile(warp % 4),
        half(warp / 4) {}

  // Begins to copy a chunk of the pass.
  __device__ __forceinline__ void load(int chunk) const {
    const GatedDeltaParams& p = pass.p;
    const int64_t unit = static_cast<int64_t>(sequence) * pass.num_chunks + chunk;
    const int64_t own = unit * p.num_v_heads + head;
    const int64_t shared_head = unit * p.num_k_heads + head / (p.num_v_heads / p.num_k_heads);
    uint4* stage = s.stages + chunk % 2 * DeltaStage::kSize;
    copy<kDeltaTall>(stage + DeltaStage::kReadout, pass.to.readout + own * kDeltaTall);
    copy<DeltaStage::kUpdates>(stage + DeltaStage::kUpdate,
                               pass.to.update + own * kDeltaTall + slice * DeltaStage::kUpdates);
    copy<kDeltaTall>(stage + DeltaStage::kQuery, pass.to.query + shared_head * kDeltaTall);
    copy<kDeltaSquare>(stage + DeltaStage::kAttention, pass.to.attention + own * kDeltaSquare);
    copy<kDeltaTall>(stage + DeltaStage::kKey, pass.to.key + shared_head * kDeltaTall);
    copy<DeltaStage::kDecays>(stage + DeltaStage::kDecay,
                              reinterpret_cast<const uint4*>(pass.to.decay + own * kDeltaChunkRows));
    copy_async_commit();
  }

  // Of a [Hv, Dk, Dv] of the states.
  __device__ __forceinline__ void load_state(const float* states) {
    each_state([&](int64_t place, float& a, float& b, bool there) {
      const float2 pair = there ? *reinterpret_cast<const float2*>(states + place) : float2{};
      a = pair.x;
      b = pair.y;
    });
  }
  __device__ __forceinline__ void store_state(float* states) {
    each_state([&](int64_t place, float a, float b, bool there) {
      if (there) *reinterpret_cast<float2*>(states + place) = make_float2(a, b);
    });
  }

  // The state as an operand. A barrier follows.
  __device__ __forceinline__ void share_state() const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = warp * 16 + lane / 4 + r * 8;
        put(s.state + row * kPitch + n * 8 + lane % 4 * 2, state[n][2 * r], state[n][2 * r + 1]);
      }
    }
  }

  // V' and q S of a chunk.
  __device__ __forceinline__ void read_state(const uint4* stage) {
    float said[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) found[n][e] = 0.0f;
    }
#pragma unroll
    for (int step = 0; step < kDeltaDepth / 16; ++step) {
      const int place = (tile * 8 + step) * kDeltaTile + lane;
      const uint4 readout = stage[DeltaStage::kReadout + place], query = stage[DeltaStage::kQuery + place];
      uint32_t right[4];
      load_matrix4_transposed(right, tile_address(s.state, kPitch, step * 16, half * 16, false));
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        mma<T>(said[n], readout, right[2 * n], right[2 * n + 1]);
        mma<T>(found[n], query, right[2 * n], right[2 * n + 1]);
      }
    }
    const uint4 packed = stage[DeltaStage::kUpdate + (half * 4 + tile) * kDeltaTile + lane];
    const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Pack<T, 2> pair = *reinterpret_cast<const Pack<T, 2>*>(&pairs[2 * n + r]);
#pragma unroll
        for (int e = 0; e < 2; ++e) update[n][2 * r + e] = to_float(pair.values[e]) - said[n][2 * r + e];
      }
    }
  }

  // V' as an operand of o. A barrier follows.
  __device__ __forceinline__ void share_update() const {
    each_update([&](int place, int, int n, int r) { put(s.update + place, update[n][2 * r], update[n][2 * r + 1]); });
  }

  // V' as an operand of the state after row `end` - 1 of the chunk. A barrier follows.
  __device__ __forceinline__ void share_decayed(const float* decay, int end) const {
    each_update([&](int place, int row, int n, int r) {
      const float left = row < end ? expf(decay[end - 1] - decay[row]) : 0.0f;
      put(s.decayed + place, left * update[n][2 * r], left * update[n][2 * r + 1]);
    });
  }

  // o of the rows from `start` of the launch on, rounded.
  __device__ __forceinline__ void write_found(const uint4* stage, const float* decay, int start) {
    const GatedDeltaParams& p = pass.p;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float grown = expf(decay[tile * 16 + lane / 4 + r * 8]);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        found[n][2 * r] *= grown;
        found[n][2 * r + 1] *= grown;
      }
    }
#pragma unroll 1
    for (int step = 0; step <= tile; ++step) {
      const uint4 attention = stage[DeltaStage::kAttention + (tile * 4 + step) * kDeltaTile + lane];
      uint32_t right[4];
      load_matrix4_transposed(right, tile_address(s.update, kPitch, step * 16, half * 16, false));
      mma<T>(found[0], attention, right[0], right[1]);
      mma<T>(found[1], attention, right[2], right[3]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = start + tile * 16 + lane / 4 + r * 8;
      const int64_t n = static_cast<int64_t>(sequence) * p.num_new + row;
      T* out = static_cast<T*>(p.out) + (n * p.num_v_heads + head) * p.value_dim;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = slice * kDeltaSlice + half * 16 + c * 8 + lane % 4 * 2;
        if (row < p.num_new && column < p.value_dim) put(out + column, found[c][2 * r], found[c][2 * r + 1]);
      }
    }
  }

  // The state after the chunk's row `end` - 1 from that before it.
  __device__ __forceinline__ void advance(const uint4* stage, float grown) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state[n][e] *= grown;
    }
#pragma unroll
    for (int step = 0; step < kDeltaChunkRows / 16; ++step) {
      const uint4 key = stage[DeltaStage::kKey + (warp * 4 + step) * kDeltaTile + lane];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t right[4];
        load_matrix4_transposed(right, tile_address(s.decayed, kPitch, step * 16, pair * 16, false));
        mma<T>(state[2 * pair], key, right[0], right[1]);
        mma<T>(state[2 * pair + 1], key, right[2], right[3]);
      }
    }
  }

 private:
  template <int kCount>
  static __device__ __forceinline__ void copy(uint4* target, const uint4* source) {
#pragma unroll
    for (int i = 0; i < kCount; i += kDeltaMmaThreads) {
      const int place = i + threadIdx.x;
      if (kCount % kDeltaMmaThreads == 0 || place < kCount) {
        copy_async16(shared_address(target + place), source + place, 16);
      }
    }
  }

  static __device__ __forceinline__ void put(T* target, float a, float b) {
    *reinterpret_cast<uint32_t*>(target) = pack2<T>(a, b);
  }

  template <typename F>
  __device__ __forceinline__ void each_state(F f) {
    const GatedDeltaParams& p = pass.p;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int column = slice * kDeltaSlice + n * 8 + lane % 4 * 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int channel = warp * 16 + lane / 4 + r * 8;
        const int64_t place = (static_cast<int64_t>(head) * p.key_dim + channel) * p.value_dim + column;
        f(place, state[n][2 * r], state[n][2 * r + 1], channel < p.key_dim && column < p.value_dim);
      }
    }
  }

  template <typename F>
  __device__ __forceinline__ void each_update(F f) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = tile * 16 + lane / 4 + r * 8;
        f(row * kPitch + half * 16 + n * 8 + lane % 4 * 2, row, n, r);
      }
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kDeltaMmaThreads, 1) delta_walk_kernel(const DeltaPass pass) {
  extern __shared__ __align__(16) char shared[];
  wait_for_previous();
  const GatedDeltaParams& p = pass.p;
  const DeltaWalkShared<T> s(shared);
  DeltaWalk<T> walk(pass, s);
  walk.load(0);
  const int64_t size = static_cast<int64_t>(p.num_v_heads) * p.key_dim * p.value_dim;
  const int certain = min(max(p.certain[walk.sequence], 0), p.num_new);
  float* carried = pass.to.state + walk.sequence * size;
  float* write = p.delta_state + p.state_writes[walk.sequence] * size;
  const bool first = pass.first_chunk == 0;
  walk.load_state(first ? p.delta_state + p.state_reads[walk.sequence] * size : carried);
  if (first && certain == 0) walk.store_state(write);
#pragma unroll 1
  for (int chunk = 0; chunk < pass.num_chunks; ++chunk) {
    const int start = (pass.first_chunk + chunk) * kDeltaChunkRows;
    const int count = min(kDeltaChunkRows, p.num_new - start), stop = start + count;
    walk.share_state();
    copy_async_wait<0>();
    __syncthreads();
    if (chunk + 1 < pass.num_chunks) walk.load(chunk + 1);
    const uint4* stage = s.stages + chunk % 2 * DeltaStage::kSize;
    const float* decay = reinterpret_cast<const float*>(stage + DeltaStage::kDecay);
    const bool ends = certain > start && certain <= stop;
    const int end = ends ? certain - start : count;
    walk.read_state(stage);
    walk.share_update();
    walk.share_decayed(decay, end);
    __syncthreads();
    walk.write_found(stage, decay, start);
    if (!ends || end == count || stop == p.num_new) {
      walk.advance(stage, expf(decay[end - 1]));
      if (ends) walk.store_state(write);
      continue;
    }
    float before[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) before[n][e] = walk.state[n][e];
    }
    walk.advance(stage, expf(decay[end - 1]));
    walk.store_state(write);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) walk.state[n][e] = before[n][e];
    }
    __syncthreads();
    walk.share_decayed(decay, count);
    __syncthreads();
    walk.advance(stage, expf(decay[count - 1]));
  }
  if ((pass.first_chunk + pass.num_chunks) * kDeltaChunkRows < p.num_new) walk.store_state(carried);
}

}  // namespace trt_eagle3
