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
    const int first = tile * Tile::Tokens;
    const int first_new = max(b.cached - first, 0);  // rows of the tile
    const int num_new = min(b.kv_end - first, Tile::Tokens) - first_new;
#pragma unroll 4
    for (int i = thread; i < Pieces; i += Tile::GroupThreads) {
      const int row = i / Chunks, chunk = i % Chunks;
      const bool old = row < first_new, held = old && first + row < b.kv_end;
      const int64_t slot = held ? cache_slot(p, b.sequence, first + row) : 0;
      const int64_t offset = (slot * p.num_kv_heads + b.kv_head) * Tile::D + chunk * 16;
      const uint32_t target = stage + fp8_offset<Tile::D>(row, chunk);
      if (!old && row < first_new + num_new) continue;
      copy_async16(target, static_cast<const char*>(p.k_cache) + offset, held ? 16 : 0);
      copy_async16(target + KeyBytes, static_cast<const char*>(p.v_cache) + offset, held ? 16 : 0);
    }
    const float k_inverse = __frcp_rn(b.k_scale), v_inverse = __frcp_rn(b.v_scale);
#pragma unroll 1
    for (int i = thread; i < num_new * Chunks; i += Tile::GroupThreads) {
      const int row = first_new + i / Chunks, chunk = i % Chunks;
      const int64_t token = static_cast<int64_t>(b.sequence) * p.num_new + first + row - b.first_new;
      const int64_t pack = (token * p.num_kv_heads + b.kv_head) * Tile::Chunks + chunk * 2;
      const uint32_t target = stage + fp8_offset<Tile::D>(row, chunk);
      store_rounded(target, static_cast<const uint4*>(p.k) + pack, k_inverse);
      store_rounded(target + KeyBytes, static_cast<const uint4*>(p.v) + pack, v_inverse);
    }
  }

  // The keys (kind 0) or values of a stage as Tile::Factor, in the layout of tile_offset(), by all threads of the
  // group.
  static __device__ __forceinline__ void widen(int kind, uint32_t stage, uint32_t wide, int thread) {
    constexpr int kSteps = Pieces / Tile::GroupThreads;
    uint4 bytes[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int2 at = piece(step * Tile::GroupThreads + thread);
      bytes[step] = load_shared(stage + kind * KeyBytes + fp8_offset<Tile::D>(at.x, at.y));
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int2 at = piece(step * Tile::GroupThreads + thread);
      const uint32_t target = wide + kind * Tile::KBytes;
      const uint4& four = bytes[step];
      store_shared(target + tile_offset<Tile::D>(at.x, at.y * 2, Tile::Tokens),
                   fp8_widened<typename Tile::Factor>(four.x, four.y));
      store_shared(target + tile_offset<Tile::D>(at.x, at.y * 2 + 1, Tile::Tokens),
                   fp8_widened<typename Tile::Factor>(four.z, four.w));
    }
  }

  // The queries of the block as what products multiply, in place, by all threads.
  static __device__ __forceinline__ void convert_queries(uint32_t queries) {
    if constexpr (!std::is_same_v<T, typename Tile::Factor>) {
#pragma unroll 2
      for (int i = threadIdx.x; i < Tile::QueryBytes / 16; i += Tile::Threads) {
        const uint4 eight = load_shared(queries + i * 16);
        store_shared(queries + i * 16, make_uint4(two_halves<T>(eight.x), two_halves<T>(eight.y),
                                                  two_halves<T>(eight.z), two_halves<T>(eight.w)));
      }
    }
  }

 private:
  // Row and chunk of piece `i`. Of 8 chunks a row, eight lanes take a half of each of two rows: then neither reading
  // bytes nor writing T has bank conflicts.
  static __device__ __forceinline__ int2 piece(int i) {
    const int row = i / Chunks, chunk = i % Chunks;
    if constexpr (Chunks != 8) return make_int2(row, chunk);
    return make_int2((row & ~1) + (chunk >> 2), chunk ^ (row & 1) << 2);
  }
  static __device__ __forceinline__ uint4 load_shared(uint32_t source) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(source)
                 : "memory");
    return value;
  }
  static __device__ __forceinline__ void store_shared(uint32_t target, const uint4& value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(target), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
  }
  static __device__ __forceinline__ void store_rounded(uint32_t target, const uint4* sixteen, float inverse) {
    const uint2 low = fp8_narrowed<T>(sixteen[0], inverse), high = fp8_narrowed<T>(sixteen[1], inverse);
    store_shared(target, make_uint4(low.x, low.y, high.x, high.y));
  }
};

}  // namespace trt_eagle3
