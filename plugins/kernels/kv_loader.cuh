// How TreeAttention brings a tile of keys and values into a stage of shared memory: the policy Tile::KVLoader.
//
// A loader starts the copies of one tile, of Tile::Tokens rows of one KV head, and leaves keys and values there as
// Tile::T in the layout of tile_offset(), keys first; the main loop commits and awaits them. Its two functions:
//   load_cached: a tile that lies in the cache whole, whose cache slots are known already;
//   load_mixed: any tile: rows below TreeBlock::cached from the cache, newer ones from the inputs k and v, zeros past
//   kv_end.
// SameTypeKV copies a cache of Tile::T without touching its values; Fp8KV (kv_loader_fp8.cuh) copies bytes.
#pragma once

#include "tree_block.cuh"

namespace trt_eagle3 {

template <typename Tile>
struct SameTypeKV {
  // Starts the copies of one tile that lies in the cache; `slots` are those of its rows.
  static __device__ __forceinline__ void load_cached(const TreeAttentionParams& p, const TreeBlock& b, const int* slots,
                                                     uint32_t stage, int thread) {
    constexpr int kSteps = Tile::Tokens * Tile::Chunks / Tile::GroupThreads;
    static_assert(kSteps * Tile::GroupThreads == Tile::Tokens * Tile::Chunks);
    const int row_bytes = p.num_kv_heads * Tile::D * 2;
    const char* keys = static_cast<const char*>(p.k_cache) + b.kv_head * Tile::D * 2;
    const char* values = static_cast<const char*>(p.v_cache) + b.kv_head * Tile::D * 2;
    // All slots before any copy: a copy writes shared memory, so a read of it would wait for the copies before.
    int sources[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      sources[step] = slots[(step * Tile::GroupThreads + thread) / Tile::Chunks];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int row = (step * Tile::GroupThreads + thread) / Tile::Chunks;
      const int chunk = (step * Tile::GroupThreads + thread) % Tile::Chunks;
      const int64_t offset = static_cast<int64_t>(sources[step]) * row_bytes + chunk * 16;
      const uint32_t target = stage + tile_offset<Tile::D>(row, chunk, Tile::Tokens);
      copy_async16(target, keys + offset, 16);
      copy_async16(target + Tile::KBytes, values + offset, 16);
    }
  }

  // Starts the copies of any tile: old tokens from the cache, new ones from the inputs, zeros past the end.
  static __device__ __forceinline__ void load_mixed(const TreeAttentionParams& p, const TreeBlock& b, uint32_t stage,
                                                    int thread, int tile) {
    const int row_bytes = p.num_kv_heads * Tile::D * 2;
#pragma unroll 2
    for (int i = thread; i < Tile::Tokens * Tile::Chunks; i += Tile::GroupThreads) {
      const int row = i / Tile::Chunks;
      const int chunk = i % Tile::Chunks;
      const int position = tile * Tile::Tokens + row;
      const bool old = position < b.cached;
      const bool held = position < b.kv_end;
      const int slot = old ? cache_slot(p, b.sequence, position) : b.sequence * p.num_new + position - b.first_new;
      const int64_t offset = static_cast<int64_t>(held ? slot : 0) * row_bytes + b.kv_head * Tile::D * 2 + chunk * 16;
      const uint32_t target = stage + tile_offset<Tile::D>(row, chunk, Tile::Tokens);
      copy_async16(target, static_cast<const char*>(old ? p.k_cache : p.k) + offset, held ? 16 : 0);
      copy_async16(target + Tile::KBytes, static_cast<const char*>(old ? p.v_cache : p.v) + offset, held ? 16 : 0);
    }
  }
};

}  // namespace trt_eagle3
