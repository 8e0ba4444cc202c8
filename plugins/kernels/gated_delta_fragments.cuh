// GatedDelta by tensor cores: what the launch over chunks hands to the walk over them.
//
// A chunk is 64 rows; heads are padded to 128 channels. Every matrix lies in the order in which lanes want it, as uint4:
// the four registers of a 16 x 16 operand of mma, or of two 16 x 8 sums that have been packed.
#pragma once

#include "gated_delta_block.cuh"

namespace trt_eagle3 {

constexpr int kDeltaChunkRows = 64;      // solved together
constexpr int kDeltaPassChunks = 32;     // of all sequences, between which and the next nothing is kept but states
constexpr int kDeltaMmaThreads = 256;
constexpr int kDeltaSlice = 32;          // columns of a head of a block of the walk
constexpr int kDeltaTile = 32;           // uint4 of an operand
constexpr int kDeltaTall = 4 * 8 * kDeltaTile;    // uint4 of [64, 128] or [128, 64]
constexpr int kDeltaSquare = 4 * 4 * kDeltaTile;  // uint4 of [64, 64]

// By units: chunks of a pass by sequences, times heads.
struct DeltaFragments {
  uint4* query;      // [units, Hk][m 4][k 8]: q
  uint4* key;        // [units, Hk][m 8][k 4]: k^T
  uint4* readout;    // [units, Hv][m 4][k 8]: W = T (beta exp(G) k), which reads the state before the chunk
  uint4* update;     // [units, Hv][n 8][m 4]: U = T (beta v), as pairs of sums
  uint4* attention;  // [units, Hv][m 4][k 4]: q k^T, decayed
  float* decay;      // [units, Hv][64]: G
  float* state;      // [B, Hv, Dk, Dv]: between passes

  __host__ static size_t bytes(const GatedDeltaParams& p, int64_t units, int64_t carried) {
    const int64_t by_key = units * p.num_k_heads, by_value = units * p.num_v_heads;
    return (2 * by_key + 2 * by_value) * kDeltaTall * sizeof(uint4) + by_value * kDeltaSquare * sizeof(uint4) +
           by_value * kDeltaChunkRows * sizeof(float) +
           carried * p.num_v_heads * p.key_dim * p.value_dim * sizeof(float);
  }

  __host__ DeltaFragments(void* workspace, const GatedDeltaParams& p, int64_t units) {
    const int64_t by_key = units * p.num_k_heads, by_value = units * p.num_v_heads;
    query = static_cast<uint4*>(workspace);
    key = query + by_key * kDeltaTall;
    readout = key + by_key * kDeltaTall;
    update = readout + by_value * kDeltaTall;
    attention = update + by_value * kDeltaTall;
    decay = reinterpret_cast<float*>(attention + by_value * kDeltaSquare);
    state = decay + by_value * kDeltaChunkRows;
  }
};

// A pass over some chunks of every sequence.
struct DeltaPass {
  GatedDeltaParams p;
  DeltaFragments to;
  int first_chunk, num_chunks;
};

// Two sums of 16 x 8 as an operand of 16 x 16.
template <typename T>
__device__ __forceinline__ uint4 pack_sums(const float (&left)[4], const float (&right)[4]) {
  return {pack2<T>(left[0], left[1]), pack2<T>(left[2], left[3]), pack2<T>(right[0], right[1]),
          pack2<T>(right[2], right[3])};
}

template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  const uint32_t registers[4] = {a.x, a.y, a.z, a.w};
  mma<T>(d, registers, b0, b1);
}

// The address that a lane hands to load_matrix4 for 16 rows and 16 columns of a tile from (row, column) on: lanes 8 to
// 15 have the second eight rows, or with `across` the second eight columns, lanes 16 to 31 the others.
template <typename T>
__device__ __forceinline__ uint32_t tile_address(const T* tile, int pitch, int row, int column, bool across) {
  const int lane = threadIdx.x % 32, low = lane / 8 % 2 * 8, high = lane / 16 * 8;
  return shared_address(tile + (row + lane % 8 + (across ? high : low)) * pitch + column + (across ? low : high));
}

}  // namespace trt_eagle3
