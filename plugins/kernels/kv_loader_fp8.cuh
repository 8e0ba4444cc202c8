// Fp8KV: brings a tile of an FP8 cache into a stage as bytes, in the layout of fp8_offset(), keys first. New tokens are
// rounded as the cache's are, so that what a token sees does not depend on when the others were written.
#pragma once

#include "tree_block.cuh"

namespace trt_eagle3 {

template <typename Tile>
struct Fp8KV {
  using T = typename Tile::T;
  static constexpr int Chunks = Tile::D / 16;
  static constexpr int KeyBytes = Tile::Tokens * Tile::D;
  static constexpr int Pieces = Tile::Tokens * Chunks;

  static __device__ __forceinline__ void load_cached(const TreeAttentionParams& p, const TreeBlock& b, const int* slots,
                                                     uint32_t stage, int thread) {
    constexpr int kSteps = Pieces / Tile::GroupThreads;
    static_assert(kSteps * Tile::GroupThreads == Pieces);
    const int row_bytes = p.num_kv_heads * Tile::D;
    const char* keys = static_cast<const char*>(p.k_cache) + b.kv_head * Tile::D;
    const char* values = static_cast<const char*>(p.v_cache) + b.kv_head * Tile::D;
    int sources[kSteps];  // all slots before any copy, as in SameTypeKV
#pragma unroll
    for (int step = 0; step < kSteps; ++step) sources[step] = slots[(step * Tile::GroupThreads + thread) / Chunks];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int row = (step * Tile::GroupThreads + thread) / Chunks;
      const int chunk = (step * Tile::GroupThreads + thread) % Chunks;
      const int64_t offset = static_cast<int64_t>(sources[step]) * row_bytes + chunk * 16;
      const uint32_t target = stage + fp8_offset<Tile::D>(row, chunk);
      copy_async16(target, keys + offset, 16);
      copy_async16(target + KeyBytes, values + offset, 16);
    }
  }

  // Old tokens are copied; new ones are read and rounded; zeros past the end.
  static __device__ __forceinline__ void load_mixed(const TreeAttentionParams& p, const TreeBlock& b, uint32_t stage,
                                                    int thread, int tile) {
    const float k_scale = kv_scale<true>(p, 0, b.kv_head), v_scale = kv_scale<true>(p, 1, b.kv_head);
#pragma unroll 1
    for (int i = thread; i < Pieces; i += Tile::GroupThreads) {
      const int row = i / Chunks, chunk = i % Chunks;
      const int position = tile * Tile::Tokens + row;
      const uint32_t target = stage + fp8_offset<Tile::D>(row, chunk);
      if (position < b.cached || position >= b.kv_end) {
        const bool held = position < b.kv_end;
        const int64_t slot = held ? cache_slot(p, b.sequence, position) : 0;
        const int64_t offset = (slot * p.num_kv_heads + b.kv_head) * Tile::D + chunk * 16;
        copy_async16(target, static_cast<const char*>(p.k_cache) + offset, held ? 16 : 0);
        copy_async16(target + KeyBytes, static_cast<const char*>(p.v_cache) + offset, held ? 16 : 0);
        continue;
      }
      const int64_t token = static_cast<int64_t>(b.sequence) * p.num_new + position - b.first_new;
      const int64_t pack = (token * p.num_kv_heads + b.kv_head) * Tile::Chunks + chunk * 2;
      store_rounded(target, static_cast<const uint4*>(p.k) + pack, k_scale);
      store_rounded(target + KeyBytes, static_cast<const uint4*>(p.v) + pack, v_scale);
    }
  }

  // The bytes of a stage as T, in the layout of tile_offset(), by all threads of the group.
  static __device__ __forceinline__ void widen(uint32_t stage, uint32_t wide, int thread) {
#pragma unroll 4
    for (int i = thread; i < 2 * Pieces; i += Tile::GroupThreads) {
      const int kind = i / Pieces;
      int row = i % Pieces / Chunks, chunk = i % Chunks;
      if constexpr (Chunks == 8) {  // eight lanes take a half of each of two rows: neither side has bank conflicts
        row = (row & ~1) + (chunk >> 2);
        chunk ^= (i / Chunks & 1) << 2;
      }
      uint4 bytes;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                   : "=r"(bytes.x), "=r"(bytes.y), "=r"(bytes.z), "=r"(bytes.w)
                   : "r"(stage + kind * KeyBytes + fp8_offset<Tile::D>(row, chunk))
                   : "memory");
      const uint32_t target = wide + kind * Tile::KBytes;
      store_shared(target + tile_offset<Tile::D>(row, chunk * 2, Tile::Tokens), fp8_widened<T>(bytes.x, bytes.y));
      store_shared(target + tile_offset<Tile::D>(row, chunk * 2 + 1, Tile::Tokens), fp8_widened<T>(bytes.z, bytes.w));
    }
  }

 private:
  static __device__ __forceinline__ void store_shared(uint32_t target, const uint4& value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(target), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
  }
  static __device__ __forceinline__ void store_rounded(uint32_t target, const uint4* sixteen, float scale) {
    const uint2 low = fp8_narrowed<T>(sixteen[0], scale), high = fp8_narrowed<T>(sixteen[1], scale);
    store_shared(target, make_uint4(low.x, low.y, high.x, high.y));
  }
};

}  // namespace trt_eagle3
