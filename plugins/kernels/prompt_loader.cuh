// The warpgroup of TreeAttention's prompt kernel that loads: units of work, queries, and tiles of the paged cache.
#pragma once

#include "prompt_tile.cuh"

namespace trt_eagle3 {

#if TRT_EAGLE3_HAS_WGMMA

template <typename Tile>
struct PromptLoader {
  const TreeAttentionParams& p;
  const PromptWorkspace& workspace;
  const PromptMaps& maps;
  const PromptRing<Tile>& ring;
  char* shared;
  int num_work, row_tiles;

  __device__ __forceinline__ void sync() const { named_barrier(1, 128); }

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
    if (least < 0) {  // up to the last new token, past which the cache may hold anything
      most = p.past_lengths[b.sequence] + p.tail - p.num_new + min(p.query_lengths[b.sequence], p.num_new);
    }
    most = min(most, p.pages_per_row * p.page_size);
    return PromptWork{index, ceil_div(most, Tile::Tokens), least >= 0};
  }

  __device__ __forceinline__ void load_queries(const TreeBlock& b) const {
    const int chunk = threadIdx.x % Tile::Chunks;
#pragma unroll 2
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

  // A tile whose last rows are past the cache's, which become zeros: row by row, by all threads.
  __device__ __forceinline__ void load_last(const TreeBlock& b, int tile, int count) const {
    int* slots = reinterpret_cast<int*>(shared + Tile::SlotsOffset);
    const int position = tile * Tile::Tokens + threadIdx.x;
    slots[threadIdx.x] = position < b.kv_end ? cache_slot(p, b.sequence, position) : -1;
    sync();
    const int chunk = threadIdx.x % Tile::Chunks;
    for (int kind = 0; kind < 2; ++kind) {
      barrier_wait(ring.empty(kind, count), ring.phase(count) ^ 1);
      const char* cache = static_cast<const char*>(kind == 0 ? p.k_cache : p.v_cache) + b.kv_head * Tile::D * 2;
#pragma unroll 2
      for (int row = threadIdx.x / Tile::Chunks; row < Tile::Tokens; row += 128 / Tile::Chunks) {
        const int slot = slots[row];
        const int64_t offset = static_cast<int64_t>(max(slot, 0)) * p.num_kv_heads * Tile::D * 2 + chunk * 16;
        copy_async16(ring.stage(kind, count) + tile_offset<Tile::D>(row, chunk, Tile::Tokens), cache + offset,
                     slot < 0 ? 0 : 16);
      }
    }
  }

  // The first tiles of a unit, `num_tiles` of them, from the last to the first, as stages `count` and on: keys or
  // values, by one warp, whose lanes start a box each.
  __device__ __forceinline__ void stream(const TreeBlock& b, int kind, int num_tiles, int count) const {
    constexpr int kPanels = Tile::D / 64;
    static_assert(Tile::Tokens / 8 * kPanels <= 32, "a lane for each box");
    const int box = threadIdx.x % 32 / kPanels * maps.box_rows, panel = threadIdx.x % kPanels;
    for (int tile = num_tiles - 1; tile >= 0; --tile, ++count) {
      const uint32_t full = ring.full(kind, count), stage = ring.stage(kind, count);
      const bool own = box < Tile::Tokens;
      const int slot = own ? cache_slot(p, b.sequence, tile * Tile::Tokens + box) : 0;  // before the wait
      barrier_wait(ring.empty(kind, count), ring.phase(count) ^ 1);
      if (threadIdx.x % 32 == 0) barrier_expect(full, Tile::StageBytes);
      __syncwarp();
      if (!own) continue;
      const int column = b.kv_head * Tile::D + panel * 64;
      copy_box(stage + panel * Tile::Tokens * 128 + box * 128, &maps.cache[kind], column, slot, full);
    }
  }

  __device__ __forceinline__ void load_unit(const PromptWork& work, int count, int done) const {
    TreeBlock b = prompt_rows<Tile>(p, work.index, row_tiles);
    set_lengths(p, b, p.past_lengths[b.sequence], p.query_lengths[b.sequence]);
    b.kv_end = min(b.first_new + b.queries, p.pages_per_row * p.page_size);
    const bool ends = work.num_tiles * Tile::Tokens > b.kv_end;
    if (done > 0) barrier_wait(ring.work_empty(), done - 1 & 1);
    if (threadIdx.x == 0) {
      *reinterpret_cast<PromptWork*>(shared + Tile::WorkOffset) = work;
      barrier_arrive(ring.work_full());
    }
    load_queries(b);
    if (ends) load_last(b, work.num_tiles - 1, count);
    copy_async_commit();
    copy_async_wait<0>();
    fence_async_proxy();
    sync();
    if (threadIdx.x == 0) {
      barrier_arrive(ring.queries_full());
      for (int kind = 0; kind < 2 && ends; ++kind) barrier_arrive(ring.full(kind, count));
    }
    const int warp = threadIdx.x / 32;
    if (warp < 2) stream(b, warp, work.num_tiles - ends, count + ends);
  }

  __device__ __forceinline__ void run() const {
    int* next_index = reinterpret_cast<int*>(shared + Tile::WorkOffset) + 3;
    int index = blockIdx.x, count = 0;
    for (int done = 0; index < num_work; ++done) {
      if (threadIdx.x == 0) *next_index = gridDim.x + atomicAdd(workspace.next, 1);
      const PromptWork work = measure(index);
      load_unit(work, count, done);
      count += work.num_tiles;
      sync();
      index = *next_index;
      sync();  // all have read it before it is written again
      if (index < num_work || threadIdx.x != 0) continue;
      barrier_wait(ring.work_empty(), done & 1);
      reinterpret_cast<PromptWork*>(shared + Tile::WorkOffset)->index = -1;
      barrier_arrive(ring.work_full());
    }
  }
};

#endif

}  // namespace trt_eagle3
