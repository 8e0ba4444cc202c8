// What TreeAttention has for prompts on Hopper: the configuration, its ring of stages, and what a block works on.
#pragma once

#include "barrier.cuh"
#include "tree_block.cuh"

namespace trt_eagle3 {

// Two warpgroups of 64 rows each multiply, a third one loads: its halves take tiles in turn, so that two are on their
// way. A stage holds keys and values of 128 slots.
template <typename Element, int kHeadDim, int kStages, bool kInTurn = true>
struct PromptTile {
  using T = Element;
  static constexpr int D = kHeadDim;
  static constexpr int Stages = kStages;
  static constexpr bool InTurn = kInTurn;  // one warpgroup begins products while the other has its softmax
  static constexpr int LoaderThreads = 64;
  static constexpr int Rows = 128;
  static constexpr int Tokens = 128;
  static constexpr int Consumers = 2;  // warpgroups
  static constexpr int Threads = 128 * (1 + Consumers);
  static constexpr int Chunks = D / 8;
  static constexpr int KBytes = Tokens * D * 2;
  static constexpr int StageBytes = 2 * KBytes;
  static constexpr int QueryOffset = Stages * StageBytes;
  static constexpr int SlotsOffset = QueryOffset + Rows * D * 2;  // int [2][Tokens]
  static constexpr int WorkOffset = SlotsOffset + 2 * Tokens * 4;
  static constexpr int BarrierOffset = WorkOffset + 16;
  static constexpr int SharedBytes = BarrierOffset + (2 * Stages + 3) * 8;
  // 65536 registers are 168 for each of 384 threads; loading needs few, and gives the rest away
  static constexpr int LoaderRegisters = 56, ConsumerRegisters = 224;
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

#if TRT_EAGLE3_HAS_WGMMA

// Addresses in shared memory. A stage is full when its copies have come, empty when every warp has read it; so is the
// place of the work and its queries.
template <typename Tile>
struct PromptRing {
  uint32_t base;

  static constexpr int kWarps = 4 * Tile::Consumers;
  __device__ __forceinline__ uint32_t stage(int i) const { return base + i % Tile::Stages * Tile::StageBytes; }
  __device__ __forceinline__ int phase(int i) const { return i / Tile::Stages & 1; }
  __device__ __forceinline__ uint32_t queries() const { return base + Tile::QueryOffset; }
  __device__ __forceinline__ uint32_t full(int i) const { return base + Tile::BarrierOffset + i % Tile::Stages * 8; }
  __device__ __forceinline__ uint32_t empty(int i) const { return full(i) + Tile::Stages * 8; }
  __device__ __forceinline__ uint32_t work_full() const { return base + Tile::BarrierOffset + Tile::Stages * 16; }
  __device__ __forceinline__ uint32_t work_empty() const { return work_full() + 8; }

  __device__ __forceinline__ uint32_t queries_full() const { return work_full() + 16; }

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < Tile::Stages; ++i) {
      barrier_init(full(i), Tile::LoaderThreads);
      barrier_init(empty(i), kWarps);
    }
    barrier_init(work_full(), 1);
    barrier_init(work_empty(), kWarps);
    barrier_init(queries_full(), 2 * Tile::LoaderThreads);
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
