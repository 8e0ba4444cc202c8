// What a block of GatedDelta has: its columns of a head's state, and how its rows lie in shared memory.
#pragma once

#include "common.cuh"

namespace trt_eagle3 {

constexpr int kDeltaColumns = 8;    // of a head that a warp solves
constexpr int kDeltaGroup = 32;     // columns of a head's state that four warps have in registers
constexpr int kDeltaParts = 4;      // those warps, each with 32 channels
constexpr int kDeltaPass = 4;       // rows whose products with the state wait for their sum over the parts
constexpr int kDeltaDepth = 128;    // channels of a head of k at most; shared rows have as many, the rest of them 0
constexpr int kDeltaWidth = 128;    // channels of a head of v at most
constexpr int kDeltaTreeRows = 64;  // more rows are a chain; of so many, those that bring states further are kept
constexpr int kDeltaStepRows = 16;  // at most in a step, of which on Hopper two blocks share a multiprocessor
constexpr int kDeltaChunk = 32;     // rows of a long chain that are solved together
constexpr int kDeltaTaps = 8;       // of the convolution at most
constexpr float kDeltaUnitEpsilon = 1e-6f;  // added to the squares of a head of q and k

// Which columns of which head: grid (blocks of a head, Hv, B); the blocks of a head are a cluster.
struct DeltaBlock {
  int head, key_head, sequence;
  int first_column, columns;  // of the head; a multiple of kDeltaGroup, which may go past the last one
  bool first_of_key_head;     // which writes what the value heads of a key head share

  __device__ __forceinline__ explicit DeltaBlock(const GatedDeltaParams& p)
      : head(blockIdx.y),
        key_head(blockIdx.y / (p.num_v_heads / p.num_k_heads)),
        sequence(blockIdx.z),
        first_column(blockIdx.x * (blockDim.x / 32) * kDeltaColumns),
        columns(blockDim.x / (32 * kDeltaParts) * kDeltaGroup),
        first_of_key_head(blockIdx.x == 0 && blockIdx.y % (p.num_v_heads / p.num_k_heads) == 0) {}
};

// Shared memory for `rows` rows at once, in floats; every part begins at a multiple of 4.
struct DeltaShared {
  uint64_t* paths;  // [64]: bit j of i: row j is on the path of row i; not used where rows are a chain
  int* parents;     // [64]: -1: the state
  float* parts;     // [kDeltaParts, kDeltaPass, 2, kDeltaWidth]: of k S and q S
  float* weight;    // [taps, 2 * kDeltaDepth + columns]: of q, k and v
  float* query;     // [rows, kDeltaDepth]: of length Dk^-1/2
  float* key;       // [rows, kDeltaDepth]: of length 1
  float* rule;      // [rows, rows]: what of row j's update row i's takes away
  float* attention; // [rows, rows]: what of row j's update row i sees
  float* update;    // [columns / 8, rows, kDeltaColumns]: v, then u
  float* found;     // [columns / 8, rows, kDeltaColumns]: o
  float* gate;      // [64]: g
  float* decay;     // [64]: sum of g along the row's path
  float* beta;      // [64]
  float* squares;   // [64]: of the block's columns of o; read by the cluster
  int rows;

  __host__ __device__ static int bytes(int rows, int taps, int columns) {
    const int each = 2 * kDeltaDepth + 2 * columns, parts = kDeltaParts * kDeltaPass * 2 * kDeltaWidth;
    return kDeltaTreeRows * 28 +
           4 * (taps * (2 * kDeltaDepth + columns) + parts + rows * each + 2 * rows * round4(rows));
  }

  __device__ __forceinline__ DeltaShared(char* memory, int rows_at_once, int taps, int columns) {
    rows = rows_at_once;
    paths = reinterpret_cast<uint64_t*>(memory);
    parents = reinterpret_cast<int*>(paths + kDeltaTreeRows);
    gate = reinterpret_cast<float*>(parents + kDeltaTreeRows);
    decay = gate + kDeltaTreeRows;
    beta = decay + kDeltaTreeRows;
    squares = beta + kDeltaTreeRows;
    parts = squares + kDeltaTreeRows;
    weight = parts + kDeltaParts * kDeltaPass * 2 * kDeltaWidth;
    query = weight + taps * (2 * kDeltaDepth + columns);
    key = query + rows * kDeltaDepth;
    update = key + rows * kDeltaDepth;
    found = update + rows * columns;
    rule = found + rows * columns;
    attention = rule + rows * round4(rows);
  }

  // Of a row's column in update and found.
  __device__ __forceinline__ int place(int row, int column) const {
    return (column / kDeltaColumns * rows + row) * kDeltaColumns + column % kDeltaColumns;
  }

  __host__ __device__ static constexpr int round4(int x) { return (x + 3) / 4 * 4; }
};

// The rows of a launch by their paths: a tree's, of which the mask says who is above whom, or a chain's.
struct DeltaPaths {
  uint64_t* paths;  // [64], as DeltaShared's
  int* parents;     // [64]
  bool tree;

  // Row above `place`; rows below 0 are the state's.
  __device__ __forceinline__ int above(int place) const { return tree && place >= 0 ? parents[place] : place - 1; }
  // Whether row j of a chunk is on the path of row i, j <= i.
  __device__ __forceinline__ bool sees(int i, int j) const { return !tree || (paths[i] >> j & 1) != 0; }

  // Reads the mask of the block's sequence; rows behind the last see nothing. A barrier of the block follows.
  __device__ __forceinline__ void read(const GatedDeltaParams& p, int sequence) const {
    if (!tree) return;
    for (int i = threadIdx.x; i < kDeltaTreeRows; i += blockDim.x) {
      const int64_t row = static_cast<int64_t>(sequence) * p.num_new + i;
      const uint8_t* mask = p.tree_mask + row * p.tail + (p.tail - p.num_new);
      uint64_t path = 0;
      int parent = -1;
      const int last = i < p.num_new ? i : -1;
#pragma unroll 8
      for (int j = 0; j <= last; ++j) {  // without branches, so that eight are in flight
        const bool there = mask[j] != 0;
        path |= static_cast<uint64_t>(there) << j;
        parent = there && j < i ? j : parent;
      }
      paths[i] = path;
      parents[i] = parent;
    }
  }
};

// Four numbers as they lie in memory, in as few registers.
template <typename T>
using Quad = std::conditional_t<sizeof(T) == 4, uint4, uint2>;
template <typename T>
__device__ __forceinline__ Quad<T> load_quad(const T* pointer) {
  return *reinterpret_cast<const Quad<T>*>(pointer);
}
template <typename T>
__device__ __forceinline__ void unpack(const Quad<T>& quad, float (&values)[4]) {
  const auto& pack = reinterpret_cast<const Pack<T, 4>&>(quad);
#pragma unroll
  for (int e = 0; e < 4; ++e) values[e] = to_float(pack.values[e]);
}

// Four numbers at `pointer`, which is aligned to as many.
template <typename T>
__device__ __forceinline__ void load4(const T* pointer, float (&values)[4]) {
  const Pack<T, 4> pack = *reinterpret_cast<const Pack<T, 4>*>(pointer);
#pragma unroll
  for (int e = 0; e < 4; ++e) values[e] = to_float(pack.values[e]);
}

template <typename T>
__device__ __forceinline__ void store4(T* pointer, const float (&values)[4]) {
  Pack<T, 4> pack;
#pragma unroll
  for (int e = 0; e < 4; ++e) pack.values[e] = from_float<T>(values[e]);
  *reinterpret_cast<Pack<T, 4>*>(pointer) = pack;
}

template <typename T>
__device__ __forceinline__ float rounded(float x) {
  return to_float(from_float<T>(x));
}

// Channels of q and k of a head, and of v of a block, in a row of qkvz.
__device__ __forceinline__ int query_channel(const GatedDeltaParams& p, const DeltaBlock& b) {
  return b.key_head * p.key_dim;
}
__device__ __forceinline__ int key_channel(const GatedDeltaParams& p, const DeltaBlock& b) {
  return (p.num_k_heads + b.key_head) * p.key_dim;
}
__device__ __forceinline__ int value_channel(const GatedDeltaParams& p, const DeltaBlock& b) {
  return 2 * p.num_k_heads * p.key_dim + b.head * p.value_dim + b.first_column;
}

// Row `place` of a sequence before the convolution: below 0 a row of entry `read`.
template <typename T>
__device__ __forceinline__ const T* delta_source(const GatedDeltaParams& p, int sequence, int read, int place,
                                                 int channel) {
  const bool before = place < 0;
  const int row = (before ? (read + 1) * (p.taps - 1) : sequence * p.num_new) + place;
  const int pitch = before ? p.channels : p.channels + p.num_v_heads * p.value_dim;
  return static_cast<const T*>(before ? p.conv_state : p.qkvz) + static_cast<int64_t>(row) * pitch + channel;
}

// What delta_rows has of a row, place < kept.
__device__ __forceinline__ float* delta_row(const GatedDeltaParams& p, int sequence, int place) {
  const int width = p.num_k_heads * p.key_dim + p.num_v_heads * (p.value_dim + 2);
  return p.delta_rows + (static_cast<int64_t>(sequence) * p.kept + place) * width;
}

// One by one: a row's width need be no multiple of four.
__device__ __forceinline__ void keep4(float* target, const float (&values)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) target[e] = values[e];
}

// A head of q or k, four channels a lane: `length` long.
__device__ __forceinline__ void make_unit(float (&x)[4], float length) {
  const float squares = warp_sum(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]);
  const float scale = length * rsqrtf(squares + kDeltaUnitEpsilon);
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] *= scale;
}

// g and beta of a value head at a row.
struct DeltaGates {
  float g, beta;

  template <typename T>
  static __device__ __forceinline__ DeltaGates of(const GatedDeltaParams& p, int sequence, int place, int head) {
    const int64_t row = static_cast<int64_t>(sequence) * p.num_new + place;
    const T* ba = static_cast<const T*>(p.ba) + row * 2 * p.num_v_heads + head;
    const float a = to_float(ba[p.num_v_heads]) + p.dt_bias[head];
    const float beta = rounded<T>(1.0f / (1.0f + expf(-to_float(ba[0]))));
    return {-expf(p.a_log[head]) * (a > 20.0f ? a : log1pf(expf(a))), beta};
  }

  // In delta_rows; place < kept.
  __device__ __forceinline__ void keep(const GatedDeltaParams& p, int sequence, int place, int head) const {
    float* kept = delta_row(p, sequence, place) + p.num_k_heads * p.key_dim + p.num_v_heads * p.value_dim + head;
    kept[0] = g;
    kept[p.num_v_heads] = beta;
  }
};

}  // namespace trt_eagle3
