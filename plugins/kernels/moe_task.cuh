// What the kernels of a mixture of experts are launched with, and which experts each row goes through.
//
// Shapes: n rows, H hidden, E experts, I inner width, k experts of a row. A *slot* is one expert of one row: row * k +
// its rank among the row's experts, the most probable first; of experts with equal logits the first counts as the more
// probable. A *unit* is an expert and some rows that go through it, as many as one product takes.
#pragma once

#include "packed_weight.cuh"

namespace trt_eagle3 {

constexpr int kMoeMaxExperts = 512, kMoeMaxTopK = 16, kMoeMaxSlots = 1024;

// A weight of T as it is: the policy Format of packed_weight.cuh. Lane 4g + t's pieces are columns 8t to 8t + 7 of each
// 32: both operands of a product may be permuted alike along K.
template <typename Element>
struct DenseWeight {
  using T = Element;
  static constexpr int Bits = 16, Pieces = 4, Groups = 1, ScaleWords = 0;
  static constexpr bool InHalf = false, Based = false, Sixteenths = false;
  using Scale = int;

  static __device__ __forceinline__ const char* scale_place(const PackedWeight&, int, int) { return nullptr; }
  // A of columns 16 block to 16 block + 15, in that order.
  static __device__ __forceinline__ void operand(const PackedSpan<DenseWeight>& span, int block, uint32_t (&a)[4]) {
    const uint4 &low = span.low[block / 2], &high = span.high[block / 2];
    a[0] = block % 2 == 0 ? low.x : low.z;
    a[1] = block % 2 == 0 ? high.x : high.z;
    a[2] = block % 2 == 0 ? low.y : low.w;
    a[3] = block % 2 == 0 ? high.y : high.w;
  }
};

// The weights of all experts, those of one after those of another.
struct ExpertWeight {
  PackedWeight first;
  int64_t data_bytes, scale_bytes, zero_bytes;  // of an expert

  __device__ __forceinline__ PackedWeight of(int expert) const {
    PackedWeight w = first;
    w.data += expert * data_bytes;
    w.scale = static_cast<const char*>(w.scale) + expert * scale_bytes;
    w.zero += w.zero == nullptr ? 0 : expert * zero_bytes;
    return w;
  }
};

struct MoeTask {
  const void* x;              // T [n, H]
  const void* router_logits;  // T [n, E]
  void* inner;                // T [n * k, I]: silu(gate) * up of every slot
  void* out;                  // T [n, H]
  ExpertWeight gate_up, down;
  int num_rows, num_experts, top_k, hidden, width, renormalise;

  // Of how many experts it is counted who goes through them: a single row's need none.
  __host__ __device__ int counted() const { return num_rows == 1 ? 0 : num_experts; }
};

// In shared memory. C experts are counted.
struct MoeLists {
  uint32_t* slots;    // [n * k] of one expert after the other, by row: row << 16 | slot
  uint32_t* units;    // [n * k] expert << 16 | first of its slots in `slots` << 4 | rows - 1
  float* shares;      // [n * k] of a slot: what its expert counts
  uint32_t* masks;    // [C][2] the rows that go through each expert
  int* begins;        // [C] where each expert's slots begin
  int* num_units;
  uint16_t* experts;  // [n * k] of a slot

  static __host__ __device__ constexpr int bytes(int num_slots, int counted) {
    return (num_slots * 14 + counted * 12 + 4 + 15) & ~15;
  }
  static __device__ __forceinline__ MoeLists at(char* shared, int num_slots, int counted) {
    MoeLists l;
    l.slots = reinterpret_cast<uint32_t*>(shared);
    l.units = l.slots + num_slots;
    l.shares = reinterpret_cast<float*>(l.units + num_slots);
    l.masks = reinterpret_cast<uint32_t*>(l.shares + num_slots);
    l.begins = reinterpret_cast<int*>(l.masks + 2 * counted);
    l.num_units = l.begins + counted;
    l.experts = reinterpret_cast<uint16_t*>(l.num_units + 1);
    return l;
  }
  __device__ __forceinline__ int count(int expert) const {
    return __popc(masks[2 * expert]) + __popc(masks[2 * expert + 1]);
  }
  // Of a row among its expert's.
  __device__ __forceinline__ int place(int expert, int row) const {
    const uint32_t before = (1u << row % 32) - 1;
    return row < 32 ? __popc(masks[2 * expert] & before)
                    : __popc(masks[2 * expert]) + __popc(masks[2 * expert + 1] & before);
  }
};

// Numbers as integers of the same order, none of them 0; NaN is the largest or the smallest.
__device__ __forceinline__ uint32_t ordered_key(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 is 0
  return max(bits >> 31 != 0 ? ~bits : bits | 0x80000000u, 1u);
}
__device__ __forceinline__ float of_ordered_key(uint32_t key) {
  return __uint_as_float(key >> 31 != 0 ? key & 0x7FFFFFFFu : ~key);
}

// A warp finds the top_k experts of a row: a lane calls found(rank, expert, share) for each. With kShares the share is
// the softmax over all experts, in float32, or that over the row's own; else 0. Lane l has experts from l * kPerLane on,
// so that the first of equals is the first lane's.
template <typename T, int kPerLane, bool kShares, typename Found>
__device__ __forceinline__ void choose_experts(const T* logits, int num_experts, int top_k, bool renormalise,
                                               const Found& found) {
  const int lane = threadIdx.x % 32;
  uint32_t keys[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = lane * kPerLane + i;
    keys[i] = expert < num_experts ? ordered_key(to_float(logits[expert])) : 0;
  }
  float largest = 0.0f, sum = 0.0f, own_share = 0.0f;
  int own_expert = 0;
#pragma unroll 1
  for (int rank = 0; rank < top_k; ++rank) {
    uint32_t own = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) own = max(own, keys[i]);
    const uint32_t most = __reduce_max_sync(0xFFFFFFFFu, own);
    if constexpr (kShares) {
      if (rank == 0) {
        largest = of_ordered_key(most);
        if (!renormalise) {
#pragma unroll
          for (int i = 0; i < kPerLane; ++i) {
            sum += keys[i] == 0 ? 0.0f : expf(of_ordered_key(keys[i]) - largest);
          }
          sum = warp_sum(sum);
        }
      }
    }
    const int winner = __ffs(__ballot_sync(0xFFFFFFFFu, own == most)) - 1;
    int first = kPerLane;
#pragma unroll
    for (int i = kPerLane - 1; i >= 0; --i) first = keys[i] == most ? i : first;
    if (lane == winner) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) keys[i] = first == i ? 0 : keys[i];
    }
    const int expert = __shfl_sync(0xFFFFFFFFu, lane * kPerLane + first, winner);
    float share = 0.0f;
    if constexpr (kShares) {
      share = expf(of_ordered_key(most) - largest);
      if (renormalise) sum += share;
    }
    if (lane == rank) {
      own_expert = expert;
      own_share = share;
    }
  }
  if (lane < top_k) found(lane, own_expert, kShares ? own_share / sum : 0.0f);
}

template <typename T, bool kShares, typename Found>
__device__ __forceinline__ void choose_experts(const T* logits, int num_experts, int top_k, bool renormalise,
                                               const Found& found) {
  if (num_experts <= 128) {
    choose_experts<T, 4, kShares>(logits, num_experts, top_k, renormalise, found);
  } else {
    choose_experts<T, kMoeMaxExperts / 32, kShares>(logits, num_experts, top_k, renormalise, found);
  }
}

// One warp: where each expert's slots begin, and the units, of at most `most` rows.
__device__ __forceinline__ void cut_units(const MoeLists& l, int num_experts, int most) {
  const int lane = threadIdx.x % 32, each = ceil_div(num_experts, 32);
  const int begin = min(lane * each, num_experts), end = min(begin + each, num_experts);
  uint32_t own = 0;  // units << 16 | slots
#pragma unroll 1
  for (int e = begin; e < end; ++e) own += static_cast<uint32_t>(ceil_div(l.count(e), most)) << 16 | l.count(e);
  uint32_t before = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(0xFFFFFFFFu, before, offset);
    before += lane >= offset ? other : 0;
  }
  if (lane == 31) *l.num_units = static_cast<int>(before >> 16);
  before -= own;
  int unit = static_cast<int>(before >> 16), slot = static_cast<int>(before & 0xFFFF);
#pragma unroll 1
  for (int e = begin; e < end; ++e) {
    const int count = l.count(e);
    l.begins[e] = slot;
#pragma unroll 1
    for (int i = 0; i < count; i += most) l.units[unit++] = e << 16 | (slot + i) << 4 | (min(most, count - i) - 1);
    slot += count;
  }
}

// The lists of a single row: each of its experts is a unit.
template <typename T, bool kShares, typename Beside>
__device__ __forceinline__ int list_one_row(const MoeTask& p, const MoeLists& l, const Beside& beside) {
  if (threadIdx.x / 32 == blockDim.x / 32 - 1) {  // of `beside` the first warps have the most to do
    choose_experts<T, kShares>(static_cast<const T*>(p.router_logits), p.num_experts, p.top_k, p.renormalise != 0,
                               [&](int rank, int expert, float share) {
                                 l.units[rank] = expert << 16 | rank << 4;
                                 l.slots[rank] = rank;
                                 if constexpr (kShares) l.shares[rank] = share;
                               });
  }
  beside();
  __syncthreads();
  return p.top_k;
}

// Before make_lists(), and a __syncthreads() is between.
__device__ __forceinline__ void clear_lists(const MoeTask& p, const MoeLists& l) {
  for (int i = threadIdx.x; i < 2 * p.counted(); i += blockDim.x) l.masks[i] = 0;
}

// A block makes its lists; returns the number of units. All blocks make the same ones: what one leaves to others of an
// expert with several units is what those have. beside(): what warps that have no row to look at do meanwhile.
template <typename T, bool kShares, typename Beside>
__device__ __forceinline__ int make_lists(const MoeTask& p, const MoeLists& l, int most, const Beside& beside) {
  const int num_slots = p.num_rows * p.top_k;
  if (p.num_rows == 1) return list_one_row<T, kShares>(p, l, beside);
#pragma unroll 1
  for (int row = (blockDim.x - 1 - threadIdx.x) / 32; row < p.num_rows; row += blockDim.x / 32) {
    const T* logits = static_cast<const T*>(p.router_logits) + static_cast<int64_t>(row) * p.num_experts;
    choose_experts<T, kShares>(logits, p.num_experts, p.top_k, p.renormalise != 0,
                               [&](int rank, int expert, float share) {
                                 const int slot = row * p.top_k + rank;
                                 l.experts[slot] = static_cast<uint16_t>(expert);
                                 atomicOr(l.masks + 2 * expert + row / 32, 1u << row % 32);
                                 if constexpr (kShares) l.shares[slot] = share;
                               });
  }
  beside();
  __syncthreads();
  if (threadIdx.x < 32) cut_units(l, p.num_experts, most);
  __syncthreads();
  for (int slot = threadIdx.x; slot < num_slots; slot += blockDim.x) {
    const int row = slot / p.top_k, expert = l.experts[slot];
    l.slots[l.begins[expert] + l.place(expert, row)] = row << 16 | slot;
  }
  __syncthreads();
  return *l.num_units;
}

}  // namespace trt_eagle3
