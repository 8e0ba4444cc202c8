// What TreeAttention has for prompts on Hopper: the configuration, its ring of stages, and what a block works on.
#pragma once

#include <cuda.h>

#include "barrier.cuh"
#include "tree_block.cuh"

namespace trt_eagle3 {

// Two warpgroups of 64 rows each multiply, a third one loads. Keys and values of 128 slots have stages of their own: a
// stage of keys is free once the scores are there.
template <typename Element, int kHeadDim, int kStages, bool kInTurn = true, bool kFp8 = false>
struct PromptTile {
  using T = Element;
  static constexpr int D = kHeadDim;
  static constexpr int Stages = kStages;
  static constexpr bool Fp8 = kFp8;        // what it reads are the bytes of an FP8 cache, widened to T (prompt_fp8.cuh)
  static constexpr bool InTurn = kInTurn;  // one warpgroup begins products while the other has its softmax
  static constexpr int Rows = 128;
  static constexpr int Tokens = 128;
  static constexpr int Consumers = 2;  // warpgroups
  static constexpr int Threads = 128 * (1 + Consumers);
  static constexpr int Chunks = D / 8;
  static constexpr int StageBytes = Tokens * D * 2;
  static constexpr int QueryOffset = 2 * Stages * StageBytes;
  static constexpr int SlotsOffset = QueryOffset + Rows * D * 2;  // int [Tokens]
  static constexpr int WorkOffset = SlotsOffset + Tokens * 4;
  static constexpr int BarrierOffset = WorkOffset + 16;
  static constexpr int SharedBytes = BarrierOffset + (4 * Stages + 3) * 8;
  // 65536 registers are 168 for each of 384 threads; loading needs few, and gives the rest away
  static constexpr int LoaderRegisters = 40, ConsumerRegisters = 232;
  static_assert(D % 64 == 0, "panels of 64 columns");
};

// What the launch before leaves in the workspace: how far each new token sees, and the next unit of work.
//   limits: int [B * S]: it sees slots [0, limit); -1: what its row of the mask says.
struct PromptWorkspace {
  int* limits;
  int* next;

  static size_t bytes(const TreeAttentionParams& p) { return (static_cast<size_t>(p.batch) * p.num_new + 4) * 4; }
  explicit PromptWorkspace(const TreeAttentionParams& p, void* base)
      : limits(static_cast<int*>(base) + 4), next(static_cast<int*>(base)) {}
};

// A unit of work, as the loader hands it to the warpgroups that multiply; index -1: there is no more.
struct PromptWork {
  int index, num_tiles, by_limits;  // by_limits: no row of these asks the mask
};

// Rows [row0, row0 + Rows) of one KV head of one sequence: row r is token r / G, head r % G. The longest rows come
// first, and the heads of one sequence together.
template <typename Tile>
__device__ __forceinline__ TreeBlock prompt_rows(const TreeAttentionParams& p, int index, int row_tiles) {
  const int pairs = p.batch * p.num_kv_heads;
  return tree_rows<Tile>(p, index % pairs, row_tiles - 1 - index / pairs);
}

// The caches as the copy engine sees them: [slots, Hkv * D], in boxes of some rows and 64 columns.
struct PromptMaps {
  CUtensorMap cache[2];  // keys, values
  int box_rows;          // divides the page size and a tile, and is a multiple of 8
};

#if TRT_EAGLE3_HAS_WGMMA

// Addresses in shared memory. A stage (of keys, kind 0, or values, kind 1) is full when its copies have come, empty
// when every warp has read it. The work's place and its queries are full at different times and empty together.
template <typename Tile>
struct PromptRing {
  uint32_t base;

  static constexpr int kWarps = 4 * Tile::Consumers;
  __device__ __forceinline__ uint32_t stage(int kind, int i) const {
    return base + (kind * Tile::Stages + i % Tile::Stages) * Tile::StageBytes;
  }
  __device__ __forceinline__ int phase(int i) const { return i / Tile::Stages & 1; }
  __device__ __forceinline__ uint32_t queries() const { return base + Tile::QueryOffset; }
  __device__ __forceinline__ uint32_t full(int kind, int i) const {
    return base + Tile::BarrierOffset + (kind * Tile::Stages + i % Tile::Stages) * 8;
  }
  __device__ __forceinline__ uint32_t empty(int kind, int i) const { return full(kind, i) + 2 * Tile::Stages * 8; }
  __device__ __forceinline__ uint32_t work_full() const { return base + Tile::BarrierOffset + 4 * Tile::Stages * 8; }
  __device__ __forceinline__ uint32_t work_empty() const { return work_full() + 8; }
  __device__ __forceinline__ uint32_t queries_full() const { return work_full() + 16; }

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < Tile::Stages; ++i) {
      for (int kind = 0; kind < 2; ++kind) {
        barrier_init(full(kind, i), 1);
        barrier_init(empty(kind, i), kWarps);
      }
    }
    barrier_init(work_full(), 1);
    barrier_init(work_empty(), kWarps);
    barrier_init(queries_full(), 1);
    barrier_init_done();
  }
};

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

#endif

}  // namespace trt_eagle3
