// GatedDelta by tensor cores, first launch: all of a chunk that needs no state before it.
//
// Idea: with G the sums of g along the rows' paths, A = strictly lower(beta_i exp(G_i - G_j) k_i k_j^T) and T = (I + A)^-1,
// a chunk's update of the state is U - W S with U = T (beta v) and W = T (beta exp(G) k): only S comes from the chunk
// before. A block has a chunk of a key head and makes q and k once for its value heads. Operands are rounded to T once.
// Bytes moved: the rows; 28 KiB a row and 16 key heads of fragments to the walk, which L2 mostly holds.
#pragma once

#include "gated_delta_convolve.cuh"
#include "gated_delta_inverse.cuh"

namespace trt_eagle3 {

template <typename T>
struct DeltaChunkShared {
  static constexpr int kTile = kDeltaChunkRows * DeltaConvolution<T>::kPitch;
  uint64_t* paths;  // [64]
  int* parents;     // [64]
  float* matrix;    // DeltaInverse
  float* spare;
  float* gate;    // [64]: g
  float* decay;   // [64]: sums of g
  float* beta;    // [64]
  float* weight;  // [3, taps, 128]: of q, k and v
  T* query;       // [64, kPitch]
  T* key;
  T* value;

  __host__ __device__ static int bytes(int taps) {
    const int floats = kDeltaChunkRows * (DeltaInverse::kPitch + 3) + DeltaInverse::kSpare + 3 * taps * kDeltaDepth;
    return kDeltaTreeRows * 12 + floats * 4 + 3 * kTile * static_cast<int>(sizeof(T));
  }

  __device__ __forceinline__ DeltaChunkShared(char* memory, int taps) {
    paths = reinterpret_cast<uint64_t*>(memory);
    parents = reinterpret_cast<int*>(paths + kDeltaTreeRows);
    matrix = reinterpret_cast<float*>(parents + kDeltaTreeRows);
    spare = matrix + kDeltaChunkRows * DeltaInverse::kPitch;
    gate = spare + DeltaInverse::kSpare;
    decay = gate + kDeltaChunkRows;
    beta = decay + kDeltaChunkRows;
    weight = beta + kDeltaChunkRows;
    query = reinterpret_cast<T*>(weight + 3 * taps * kDeltaDepth);
    key = query + kTile;
    value = key + kTile;
  }
};

// Warp w has rows 16 (w % 4) on of the products of a chunk, and half of their columns.
template <typename T>
struct DeltaProducts {
  static constexpr int kPitch = DeltaConvolution<T>::kPitch;
  const DeltaChunkShared<T>& s;
  const DeltaPaths& paths;

  static __device__ __forceinline__ int tile() { return threadIdx.x / 32 % 4; }
  static __device__ __forceinline__ int half() { return threadIdx.x / 128; }

  // A of a value head to shared memory, its attention to the walk. The products of rows are made anew for each: to keep
  // them costs registers that everything else needs. A barrier follows.
  __device__ __forceinline__ void decay(uint4* attention) const {
    const int lane = threadIdx.x % 32;
    float of_key[4][4] = {}, of_query[4][4] = {};
    multiply(of_key, of_query);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = tile() * 16 + lane / 4 + r * 8;
      const float end = s.decay[i], beta = s.beta[i];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        float rule[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int j = half() * 32 + n * 8 + lane % 4 * 2 + e;
          const float left = j <= i && paths.sees(i, j) ? expf(end - s.decay[j]) : 0.0f;
          of_query[n][2 * r + e] *= left;
          rule[e] = j < i ? beta * left * of_key[n][2 * r + e] : 0.0f;
        }
        float2* target = reinterpret_cast<float2*>(s.matrix + i * DeltaInverse::kPitch + half() * 32 + n * 8);
        target[lane % 4] = make_float2(rule[0], rule[1]);
      }
    }
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      attention[(tile() * 4 + half() * 2 + pair) * kDeltaTile + lane] =
          pack_sums<T>(of_query[2 * pair], of_query[2 * pair + 1]);
    }
  }

  // T (scale x) of `x` [64, kPitch], packed: pair of columns c goes to target[c * stride].
  template <bool kDecays>
  __device__ __forceinline__ void solve(const T* x, uint4* target, int stride) const {
    const int lane = threadIdx.x % 32, row = tile() * 16 + lane / 4;
    float sums[8][4] = {};
#pragma unroll 1
    for (int step = 0; step <= tile(); ++step) {
      uint32_t left[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int column = step * 16 + r / 2 * 8 + lane % 4 * 2;
        const float2 pair = *reinterpret_cast<const float2*>(s.matrix + (row + r % 2 * 8) * DeltaInverse::kPitch + column);
        left[r] = pack2<T>(pair.x * scale<kDecays>(column), pair.y * scale<kDecays>(column + 1));
      }
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        uint32_t right[4];
        load_matrix4_transposed(right, tile_address(x, kPitch, step * 16, half() * 64 + pair * 16, false));
        mma<T>(sums[2 * pair], left, right[0], right[1]);
        mma<T>(sums[2 * pair + 1], left, right[2], right[3]);
      }
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      target[(half() * 4 + pair) * stride + lane] = pack_sums<T>(sums[2 * pair], sums[2 * pair + 1]);
    }
  }

  // q and k^T as operands of the walk.
  __device__ __forceinline__ void hand_over(uint4* query, uint4* key) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int step = half() * 4 + i;
      uint32_t r[4];
      load_matrix4(r, tile_address(s.query, kPitch, tile() * 16, step * 16, false));
      query[(tile() * 8 + step) * kDeltaTile + lane] = {r[0], r[1], r[2], r[3]};
      load_matrix4_transposed(r, tile_address(s.key, kPitch, i * 16, warp * 16, true));
      key[(warp * 4 + i) * kDeltaTile + lane] = {r[0], r[1], r[2], r[3]};
    }
  }

 private:
  // k k^T and q k^T, 32 columns.
  __device__ __forceinline__ void multiply(float (&of_key)[4][4], float (&of_query)[4][4]) const {
    if (tile() / 2 < half()) return;  // above the diagonal
#pragma unroll 2
    for (int step = 0; step < kDeltaDepth / 16; ++step) {
      uint32_t left[4], query[4];
      load_matrix4(left, tile_address(s.key, kPitch, tile() * 16, step * 16, false));
      load_matrix4(query, tile_address(s.query, kPitch, tile() * 16, step * 16, false));
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t right[4];
        load_matrix4(right, tile_address(s.key, kPitch, half() * 32 + pair * 16, step * 16, true));
        mma<T>(of_key[2 * pair], left, right[0], right[1]);
        mma<T>(of_key[2 * pair + 1], left, right[2], right[3]);
        mma<T>(of_query[2 * pair], query, right[0], right[1]);
        mma<T>(of_query[2 * pair + 1], query, right[2], right[3]);
      }
    }
  }

  template <bool kDecays>
  __device__ __forceinline__ float scale(int row) const {
    return kDecays ? s.beta[row] * expf(s.decay[row]) : s.beta[row];
  }
};

// grid (chunks of the pass, Hk, B)
template <typename T>
__global__ void __launch_bounds__(kDeltaMmaThreads, 2) delta_chunk_kernel(const DeltaPass pass) {
  extern __shared__ __align__(16) char shared[];
  wait_for_previous();
  const GatedDeltaParams& p = pass.p;
  const DeltaChunkShared<T> s(shared, p.taps);
  const DeltaPaths paths{s.paths, s.parents, p.num_new <= kDeltaTreeRows};
  const int sequence = blockIdx.z, key_head = blockIdx.y, ratio = p.num_v_heads / p.num_k_heads;
  const int start = (pass.first_chunk + blockIdx.x) * kDeltaChunkRows, taps = p.taps * kDeltaDepth;
  const int keys = p.num_k_heads * p.key_dim, query = key_head * p.key_dim, key = keys + query;
  const int64_t unit = static_cast<int64_t>(sequence) * pass.num_chunks + blockIdx.x;
  const DeltaConvolution<T> rows{p, paths, sequence, start, p.state_reads[sequence]};
  rows.prefetch(query, p.key_dim);
  rows.prefetch(key, p.key_dim);
  rows.prefetch(2 * keys + key_head * ratio * p.value_dim, ratio * p.value_dim);
  paths.read(p, sequence);
  rows.load_weight(query, p.key_dim, s.weight);
  rows.load_weight(key, p.key_dim, s.weight + taps);
  if (start == 0) {
    const int write = p.state_writes[sequence], certain = min(max(p.certain[sequence], 0), p.num_new);
    rows.write_window(write, certain, query, p.key_dim);
    rows.write_window(write, certain, key, p.key_dim);
    rows.write_window(write, certain, 2 * keys + key_head * ratio * p.value_dim, ratio * p.value_dim);
  }
  __syncthreads();
  rows.template run<true>(query, p.key_dim, s.weight, rsqrtf(static_cast<float>(p.key_dim)), -1, s.query);
  rows.template run<true>(key, p.key_dim, s.weight + taps, 1.0f, query, s.key);
  const DeltaProducts<T> products{s, paths};
#pragma unroll 1
  for (int head = key_head * ratio; head < (key_head + 1) * ratio; ++head) {
    const int64_t of_head = unit * p.num_v_heads + head;
    const int value = head * p.value_dim;
    rows.load_weight(2 * keys + value, p.value_dim, s.weight + 2 * taps);
    rows.gates(head, s.gate, s.beta);
    __syncthreads();
    if (head == key_head * ratio) {
      const int64_t of_key = unit * p.num_k_heads + key_head;
      products.hand_over(pass.to.query + of_key * kDeltaTall, pass.to.key + of_key * kDeltaTall);
    }
    rows.template run<false>(2 * keys + value, p.value_dim, s.weight + 2 * taps, 1.0f, keys + value, s.value);
    rows.sum_gates(s.gate, s.decay);
    __syncthreads();
    if (threadIdx.x < kDeltaChunkRows) {
      pass.to.decay[of_head * kDeltaChunkRows + threadIdx.x] = s.decay[threadIdx.x];
    }
    products.decay(pass.to.attention + of_head * kDeltaSquare);
    __syncthreads();
    DeltaInverse{s.matrix, s.spare}.run();
    __syncthreads();
    products.template solve<false>(s.value, pass.to.update + of_head * kDeltaTall + products.tile() * kDeltaTile,
                                   4 * kDeltaTile);
    products.template solve<true>(s.key, pass.to.readout + of_head * kDeltaTall + products.tile() * 8 * kDeltaTile,
                                  kDeltaTile);
    __syncthreads();
  }
}

}  // namespace trt_eagle3
