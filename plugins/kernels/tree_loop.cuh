// The main loop of TreeAttention: tiles of the cache through a ring of stages, scores, running softmax, weighted
// values.
#pragma once

#include "kv_loader.cuh"
#include "kv_loader_fp8.cuh"

namespace trt_eagle3 {

// The online softmax of one thread's two rows (Milakov and Gimelshein 2018): running maximum m and denominator d of
// the scores so far, times log2(e).
struct OnlineSoftmax {
  float m[2] = {-INFINITY, -INFINITY};
  float d[2] = {0.0f, 0.0f};
  float rescale_by[2];  // 2^(old m - new m)
  bool m_changed;       // of one of the two

  // Turns scores into weights 2^(score - m), with m and d brought up to date.
  template <int kTiles>
  __device__ __forceinline__ void update(float (&scores)[kTiles][4], float scale_log2) {
    bool changed = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float best = scores[0][2 * half];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) best = fmaxf(best, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
      const float new_m = fmaxf(m[half], quad_max(best) * scale_log2);
      const float base = new_m == -INFINITY ? 0.0f : new_m;
      changed = changed || new_m != m[half];
      rescale_by[half] = fast_exp2(m[half] - base);
      m[half] = new_m;
      float added = 0.0f;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          scores[j][e] = fast_exp2(fmaf(scores[j][e], scale_log2, -base));
          added += scores[j][e];
        }
      }
      d[half] = d[half] * rescale_by[half] + added;
    }
    m_changed = changed;
  }

  template <int kColumns>
  __device__ __forceinline__ void rescale(float (&out)[kColumns][4]) const {
    if (__any_sync(0xffffffffu, m_changed)) rescale_all(out);
  }

  // Without asking whether a maximum of the warp moved: faster where products run meanwhile.
  template <int kColumns>
  __device__ __forceinline__ void rescale_all(float (&out)[kColumns][4]) const {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[j][e] *= rescale_by[e >> 1];
    }
  }
};

// One group's loop over its tiles: tiles worker, worker + stride, ... of the row, through its ring of stages. The index
// of a tile counts this group's tiles from 0; it lives in stage index % Stages.
template <typename Tile>
struct TreeLoop {
  using Scores = float[Tile::Tokens / 8][4];
  const TreeAttentionParams& p;
  const TreeBlock& b;
  uint32_t ring, wide;
  int* slots;  // [Stages][Tokens] of the tiles to load
  const uint32_t* mask;
  uint32_t queries;
  int group, thread, worker, stride, num_tiles, clear_end;
  float scale_log2;

  // The slot of this thread's row of a tile: looked up two tiles before it is loaded, since memory is busy and slow to
  // answer, and given to the others a tile later by keep(); they see it after the next arrive().
  __device__ __forceinline__ int look_up(int tile) const {
    const int position = tile * Tile::Tokens + thread;
    return thread < Tile::Tokens && position < b.cached ? cache_slot(p, b.sequence, position) : 0;
  }
  __device__ __forceinline__ void keep(int slot, int index) const {
    if (thread < Tile::Tokens) slots[index % Tile::Stages * Tile::Tokens + thread] = slot;
  }

  __device__ __forceinline__ bool all_cached(int tile) const { return (tile + 1) * Tile::Tokens <= b.cached; }

  // A tile of old tokens alone.
  __device__ __forceinline__ void load_old(int tile, int index) const {
    const int stage = index % Tile::Stages;
    Tile::KVLoader::load_cached(p, b, slots + stage * Tile::Tokens, ring + stage * Tile::StageBytes, thread);
  }

  __device__ __forceinline__ void load(int tile, int index) const {
    if (tile < num_tiles) {
      if (all_cached(tile)) {
        load_old(tile, index);
      } else {
        Tile::KVLoader::load_mixed(p, b, ring + index % Tile::Stages * Tile::StageBytes, thread, tile);
      }
    }
    copy_async_commit();
  }

  // Waits until the next tile is in its stage and every thread of the group is past the tile before.
  __device__ __forceinline__ uint32_t arrive(int index) const {
    copy_async_wait<Tile::Stages - 2>();
    if constexpr (Tile::Wgmma) fence_async_proxy();
    group_sync<Tile>(group);
    return ring + index % Tile::Stages * Tile::StageBytes;
  }

  // Under the products of tile `tile`, the `index`th: the one Stages - 1 later is loaded.
  __device__ __forceinline__ void load_next(int& slot, int tile, int index) const {
    keep(slot, index + Tile::Stages);
    slot = look_up(tile + (Tile::Stages + 1) * stride);
    load(tile + (Tile::Stages - 1) * stride, index + Tile::Stages - 1);
  }

  __device__ __forceinline__ void mask_tile(Scores& scores, int tile) const {
    if ((tile + 1) * Tile::Tokens <= clear_end && tile * Tile::Tokens >= b.clear_begin) return;
    const int row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mask_scores(p, b, mask, scores, row + 8 * half, half, tile * Tile::Tokens, (thread & 3) * 2);
    }
  }

  // Widens the bytes of keys (kind 0) or values that have come as the `index`th tile, unless there is none.
  __device__ __forceinline__ void widen(int kind, int tile, int index) const {
    if (tile < num_tiles) Tile::KVLoader::widen(kind, ring + index % Tile::Stages * Tile::StageBytes, wide, thread);
  }
  __device__ __forceinline__ void widened() const {
    fence_async_proxy();
    group_sync<Tile>(group);
  }

  // run() for tiles that are widened in shared memory: values under the product with keys, keys of the next tile under
  // the product with values.
  template <typename Query, typename Out>
  __device__ __forceinline__ void run_widened(const Query& query, Out& out, OnlineSoftmax& softmax) const {
    const int warp = thread / 32, lane = thread % 32;
    int slot = look_up(worker + Tile::Stages * stride);
    int tile = worker;
    arrive(0);
    widen(0, tile, 0);
    widened();
#pragma unroll 1
    for (int index = 0; tile < num_tiles; tile += stride, ++index) {
      Scores scores;
      start_qk<Tile>(scores, queries, wide, warp);
      load_next(slot, tile, index);
      widen(1, tile, index);
      finish_qk<Tile>(scores, query, wide, lane);
      mask_tile(scores, tile);
      softmax.update(scores, scale_log2);
      softmax.rescale(out);
      widened();  // and the keys are not needed any more
      start_pv<Tile>(out, scores, wide + Tile::KBytes, lane);
      arrive(index + 1);
      widen(0, tile + stride, index + 1);
      finish_pv<Tile>(out);
      widened();
    }
    end_together(tile, 3);
  }

  // Groups whose barriers have numbers wait equally often, so that racecheck can count them; a tile takes `waits`.
  __device__ __forceinline__ void end_together(int tile, int waits) const {
    if constexpr (Tile::Groups > 1 && Tile::GroupThreads > 32) {
      for (int i = 0; i < waits && group > 0 && tile - group < num_tiles; ++i) group_sync<Tile>(group);
    }
  }

  template <typename Query, typename Out>
  __device__ __forceinline__ void run(const Query& query, Out& out, OnlineSoftmax& softmax) const {
    const int warp = thread / 32, lane = thread % 32;
    int slot = look_up(worker + Tile::Stages * stride);
    int tile = worker;
#pragma unroll 1
    for (int index = 0; tile < num_tiles; tile += stride, ++index) {
      const uint32_t keys = arrive(index);
      Scores scores;
      start_qk<Tile>(scores, queries, keys, warp);
      load_next(slot, tile, index);
      finish_qk<Tile>(scores, query, keys, lane);
      mask_tile(scores, tile);
      softmax.update(scores, scale_log2);
      softmax.rescale(out);
      start_pv<Tile>(out, scores, keys + Tile::KBytes, lane);
      finish_pv<Tile>(out);
    }
    end_together(tile, 1);
  }
};

// Leaves this block's part of the result in shared memory: float out [Groups][Rows][PartialStride] at the start and
// float2 (m, d) [Groups][Rows] at StatesOffset. `first_slots` is what look_up says of the group's first tiles; what
// the launch before makes is read after await_new(), and `tokens` hold their first piece then.
template <typename Tile, typename AwaitNew>
__device__ __forceinline__ void attend(const TreeAttentionParams& p, const TreeBlock& b, int split, int num_splits,
                                       const int (&first_slots)[Tile::Stages], char* shared, AwaitNew await_new,
                                       NewTokens<Tile>& tokens) {
  const int group = threadIdx.x / Tile::GroupThreads;
  const int thread = threadIdx.x % Tile::GroupThreads;
  const int warp = thread / 32, lane = thread % 32;
  uint32_t* mask = reinterpret_cast<uint32_t*>(shared + Tile::MaskOffset);
  const TreeLoop<Tile> loop{
      p,
      b,
      shared_address(shared) + group * Tile::Stages * Tile::StageBytes,
      shared_address(shared) + Tile::WideOffset + group * Tile::WideBytes,
      reinterpret_cast<int*>(shared + Tile::SlotsOffset) + group * Tile::Stages * Tile::Tokens,
      mask,
      shared_address(shared) + Tile::QueryOffset,
      group,
      thread,
      first_tile<Tile>(b) + split * Tile::Groups + group,
      num_splits * Tile::Groups,
      ceil_div(b.kv_end, Tile::Tokens),
      p.mask == MaskKind::kCausal ? min(b.kv_end, b.first_new + token_of(p, b.row0) + 1) : b.past,
      p.scale * b.k_scale * 1.44269504088896341f,
  };
#pragma unroll
  for (int stage = 0; stage < Tile::Stages; ++stage) loop.keep(first_slots[stage], stage);
  group_sync<Tile>(group);
  if (p.prefetch_safe != 0) {
#pragma unroll 1
    for (int stage = 0; stage < Tile::Stages - 1; ++stage) {
      const int tile = loop.worker + stage * loop.stride;
      if (tile < loop.num_tiles && loop.all_cached(tile)) loop.load_old(tile, stage);
    }
  }
  await_new();
  load_queries<Tile>(p, b, loop.queries);  // arrive with the first tile
#pragma unroll 1
  for (int stage = 0; stage < Tile::Stages - 1; ++stage) {
    const int tile = loop.worker + stage * loop.stride;
    if (p.prefetch_safe == 0 || tile >= loop.num_tiles || !loop.all_cached(tile)) {
      loop.load(tile, stage);
    } else {
      copy_async_commit();  // on its way since before await_new()
    }
  }
  copy_async_wait<Tile::Stages - 2>();
  __syncthreads();  // the queries and the mask are there
  if constexpr (Tile::Widens) {
    Tile::KVLoader::convert_queries(loop.queries);
    fence_async_proxy();
    __syncthreads();
  }
  if (p.written == 0) tokens.write(p, b);

  uint32_t query[Tile::Wgmma ? 1 : Tile::D / 16][4];
  if constexpr (!Tile::Wgmma) {
#pragma unroll
    for (int step = 0; step < Tile::D / 16; ++step) {
      if constexpr (Tile::Fp8) {
        fp8_load_query<Tile>(query[step], loop.queries, warp * 16, step, lane);
      } else {
        load_query<Tile>(query[step], loop.queries, warp * 16, step, lane);
      }
    }
  }
  float out[Tile::D / 8][4] = {};
  OnlineSoftmax softmax;
  if constexpr (Tile::Widens) {
    loop.run_widened(query, out, softmax);
  } else {
    loop.run(query, out, softmax);
  }
  copy_async_wait<0>();
  __syncthreads();

  float* partial = reinterpret_cast<float*>(shared);
  float2* states = reinterpret_cast<float2*>(shared + Tile::StatesOffset);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = group * Tile::Rows + warp * 16 + lane / 4 + 8 * half;
    const float total = quad_sum(softmax.d[half]);
    if ((lane & 3) == 0) states[row] = make_float2(softmax.m[half], total);
    if constexpr (Tile::Fp8 && !Tile::Wgmma) {
      fp8_store_sums<Tile>(partial + row * Tile::PartialStride, out, half, lane);
    } else {
#pragma unroll
      for (int j = 0; j < Tile::D / 8; ++j) {
        *reinterpret_cast<float2*>(partial + row * Tile::PartialStride + j * 8 + (lane & 3) * 2) =
            make_float2(out[j][2 * half], out[j][2 * half + 1]);
      }
    }
  }
  __syncthreads();
}

}  // namespace trt_eagle3
