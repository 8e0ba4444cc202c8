// The warpgroup of TreeAttention's prompt kernel that loads: units of work, queries, and tiles of the paged cache.
#pragma once

#include "prompt_tile.cuh"

namespace trt_eagle3 {

#if TRT_EAGLE3_HAS_WGMMA

template <typename Tile>
struct PromptLoader {
  const TreeAttentionParams& p;
  const PromptWorkspace& workspace;
  const PromptRing<Tile>& ring;
  char* shared;
  int num_work, row_tiles;

  __device__ __forceinline__ void sync() const { asm volatile("bar.sync 1, 128;\n" ::: "memory"); }

  // How many tiles any row of the block sees, and whether limits say it all. Each warp finds out for itself.
  __device__ __forceinline__ PromptWork measure(int index) const {
    const TreeBlock b = prompt_rows<Tile>(p, index, row_tiles);
    const int first = token_of(p, b.row0), count = token_of(p, b.row0 + b.rows - 1) + 1 - first;
    const int* limits = workspace.limits + b.sequence * p.num_new + first;
    int most = 0, least = 0;
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      const int limit = limits[i];
      most = max(most, limit);
      least = min(least, limit);
    }
    most = __reduce_max_sync(0xffffffffu, most);
    least = __reduce_min_sync(0xffffffffu, least);
    if (least < 0) most = p.past_lengths[b.sequence] + p.tail;
    most = min(most, p.pages_per_row * p.page_size);
    return PromptWork{index, ceil_div(most, Tile::Tokens), least >= 0};
  }

  __device__ __forceinline__ void load_queries(const TreeBlock& b) const {
    const int chunk = threadIdx.x % Tile::Chunks;
#pragma unroll 4
    for (int row = threadIdx.x / Tile::Chunks; row < Tile::Rows; row += 128 / Tile::Chunks) {
      const bool inside = row < b.rows;
      const int token = token_of(p, b.row0 + row);
      const int head = b.kv_head * b.group + b.row0 + row - token * b.group;
      const int64_t head_row = (static_cast<int64_t>(b.sequence) * p.num_new + token) * p.num_heads + head;
      copy_async16(ring.queries() + tile_offset<Tile::D>(row, chunk, Tile::Rows),
                   static_cast<const typename Tile::T*>(p.q) + (inside ? head_row * Tile::D + chunk * 8 : 0),
                   inside ? 16 : 0);
    }
  }

  // Copies the rows whose cache slots `slots` names; those with a negative one become zeros.
  __device__ __forceinline__ void load_tile(const char* keys, int64_t values_minus_keys, const int* slots,
                                            uint32_t stage) const {
    constexpr int kRowsAtOnce = 128 / Tile::Chunks;
    const int row_bytes = p.num_kv_heads * Tile::D * 2;
    const int first = threadIdx.x / Tile::Chunks;
    const uint32_t target = stage + tile_offset<Tile::D>(first, threadIdx.x % Tile::Chunks, Tile::Tokens);
    static_assert(kRowsAtOnce % 8 == 0, "rows of a thread are swizzled alike");
#pragma unroll
    for (int step = 0; step < Tile::Tokens / kRowsAtOnce; ++step) {
      const int slot = slots[first + step * kRowsAtOnce];
      const char* source = keys + static_cast<int64_t>(max(slot, 0)) * row_bytes;
      const int bytes = slot < 0 ? 0 : 16;
      copy_async16(target + step * kRowsAtOnce * 128, source, bytes);
      copy_async16(target + step * kRowsAtOnce * 128 + Tile::KBytes, source + values_minus_keys, bytes);
    }
  }

  __device__ __forceinline__ int look_up(const TreeBlock& b, int tile) const {
    if (tile < 0) return -1;
    const int position = tile * Tile::Tokens + threadIdx.x;
    return position < b.kv_end ? cache_slot(p, b.sequence, position) : -1;
  }

  // Tiles of one unit from the last to the first; `count` are those that came before.
  __device__ __forceinline__ void load_unit(const PromptWork& work, int& count) const {
    TreeBlock b = prompt_rows<Tile>(p, work.index, row_tiles);
    set_lengths(p, b, p.past_lengths[b.sequence], p.query_lengths[b.sequence]);
    b.kv_end = min(b.first_new + b.queries, p.pages_per_row * p.page_size);
    const int column = b.kv_head * Tile::D * 2 + threadIdx.x % Tile::Chunks * 16;
    const char* keys = static_cast<const char*>(p.k_cache) + column;
    const int64_t values_minus_keys = static_cast<const char*>(p.v_cache) - static_cast<const char*>(p.k_cache);
    int* slots = reinterpret_cast<int*>(shared + Tile::SlotsOffset);
    if (work.num_tiles > 0) load_queries(b);
    int slot = look_up(b, work.num_tiles - 1);
    for (int i = 0; i < work.num_tiles; ++i, ++count) {
      slots[count % 2 * Tile::Tokens + threadIdx.x] = slot;
      slot = look_up(b, work.num_tiles - 2 - i);
      sync();
      barrier_wait(ring.empty(count), ring.phase(count) ^ 1);
      load_tile(keys, values_minus_keys, slots + count % 2 * Tile::Tokens, ring.stage(count));
      copy_async_commit();
      if (i > 0) arrived<1>(count - 1);
    }
    if (work.num_tiles > 0) arrived<0>(count - 1);
  }

  template <int kPending>
  __device__ __forceinline__ void arrived(int index) const {
    copy_async_wait<kPending>();
    fence_async_proxy();
    barrier_arrive(ring.full(index));
  }

  __device__ __forceinline__ void run() const {
    PromptWork* place = reinterpret_cast<PromptWork*>(shared + Tile::WorkOffset);
    int index = blockIdx.x, count = 0;
    for (int done = 0;; ++done) {
      int* next_index = reinterpret_cast<int*>(place) + 3;
      PromptWork work{-1, 0, 0};
      if (index < num_work) work = measure(index);
      if (done > 0) barrier_wait(ring.work_empty(), done - 1 & 1);
      if (threadIdx.x == 0) {
        *place = work;
        barrier_arrive(ring.work_full());
        *next_index = work.index < 0 ? 0 : gridDim.x + atomicAdd(workspace.next, 1);
      }
      if (work.index < 0) return;
      load_unit(work, count);
      sync();
      index = *next_index;
      sync();  // all have read it before it is written again
    }
  }
};

#endif

}  // namespace trt_eagle3
