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
  int half, thread;  // of the warpgroup; of its threads

  static constexpr int kThreads = Tile::LoaderThreads;

  __device__ __forceinline__ void sync() const { asm volatile("bar.sync 1, 128;\n" ::: "memory"); }
  __device__ __forceinline__ void sync_half() const {
    if (half == 0) {
      asm volatile("bar.sync 2, 64;\n" ::: "memory");
    } else {
      asm volatile("bar.sync 3, 64;\n" ::: "memory");
    }
  }

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
    const int chunk = threadIdx.x % Tile::Chunks;  // by both halves
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
    constexpr int kRowsAtOnce = kThreads / Tile::Chunks;
    const int row_bytes = p.num_kv_heads * Tile::D * 2;
    const int first = thread / Tile::Chunks, chunk = thread % Tile::Chunks;
    // rows that are 8 apart are swizzled alike
    constexpr int kTargets = 8 / kRowsAtOnce;
    uint32_t targets[kTargets];
#pragma unroll
    for (int i = 0; i < kTargets; ++i) {
      targets[i] = stage + tile_offset<Tile::D>(first + i * kRowsAtOnce, chunk, Tile::Tokens);
    }
#pragma unroll 8
    for (int step = 0; step < Tile::Tokens / kRowsAtOnce; ++step) {
      const int slot = slots[first + step * kRowsAtOnce];
      const char* source = keys + static_cast<int64_t>(max(slot, 0)) * row_bytes;
      const int bytes = slot < 0 ? 0 : 16;
      const uint32_t target = targets[step % kTargets] + step / kTargets * 1024;
      copy_async16(target, source, bytes);
      copy_async16(target + Tile::KBytes, source + values_minus_keys, bytes);
    }
  }

  // Slots of this thread's rows of a tile, -1 past the end.
  __device__ __forceinline__ int2 look_up(const TreeBlock& b, int tile) const {
    const int position = tile * Tile::Tokens + thread;
    const auto find = [&](int at) { return tile >= 0 && at < b.kv_end ? cache_slot(p, b.sequence, at) : -1; };
    return make_int2(find(position), find(position + kThreads));
  }

  __device__ __forceinline__ void arrived(uint32_t barrier) const {
    copy_async_wait<0>();
    fence_async_proxy();
    barrier_arrive(barrier);
  }

  // This half's tiles of one unit, from the last to the first; `count` tiles came before. The first one is on its way
  // before the unit before has been multiplied; then `begin` waits for that and hands the work over.
  template <typename Begin>
  __device__ __forceinline__ void load_unit(const PromptWork& work, int count, Begin begin) const {
    TreeBlock b = prompt_rows<Tile>(p, work.index, row_tiles);
    set_lengths(p, b, p.past_lengths[b.sequence], p.query_lengths[b.sequence]);
    b.kv_end = min(b.first_new + b.queries, p.pages_per_row * p.page_size);
    const char* keys = static_cast<const char*>(p.k_cache) + b.kv_head * Tile::D * 2 + thread % Tile::Chunks * 16;
    const int64_t values_minus_keys = static_cast<const char*>(p.v_cache) - static_cast<const char*>(p.k_cache);
    int* slots = reinterpret_cast<int*>(shared + Tile::SlotsOffset) + half * Tile::Tokens;
    int i = (count + half) % 2;
    int2 found = look_up(b, work.num_tiles - 1 - i);
    const auto load = [&] {
      sync_half();  // all are past the tile before
      slots[thread] = found.x;
      slots[thread + kThreads] = found.y;
      sync_half();
      found = look_up(b, work.num_tiles - 3 - i);
      barrier_wait(ring.empty(count + i), ring.phase(count + i) ^ 1);
      load_tile(keys, values_minus_keys, slots, ring.stage(count + i));
      copy_async_commit();
    };
    const bool some = i < work.num_tiles;
    if (some) load();
    begin();
    load_queries(b);
    copy_async_commit();
    arrived(ring.queries_full());
    if (some) barrier_arrive(ring.full(count + i));
    for (i += 2; i < work.num_tiles; i += 2) {
      load();
      arrived(ring.full(count + i));
    }
  }

  __device__ __forceinline__ void run() const {
    PromptWork* place = reinterpret_cast<PromptWork*>(shared + Tile::WorkOffset);
    int* next_index = reinterpret_cast<int*>(place) + 3;
    int index = blockIdx.x, count = 0;
    for (int done = 0;; ++done) {
      const PromptWork work = index < num_work ? measure(index) : PromptWork{-1, 0, 0};
      const auto begin = [&] {
        if (done > 0) barrier_wait(ring.work_empty(), done - 1 & 1);
        if (threadIdx.x != 0) return;
        *place = work;
        barrier_arrive(ring.work_full());
      };
      if (work.index < 0) return begin();
      if (threadIdx.x == 0) *next_index = gridDim.x + atomicAdd(workspace.next, 1);
      load_unit(work, count, begin);
      count += work.num_tiles;
      sync();
      index = *next_index;
      sync();  // all have read it before it is written again
    }
  }
};

#endif

}  // namespace trt_eagle3
