// TreeAttention: writes the new keys and values into a paged cache, then attends from every new token over its row.
//
// Idea: the G query heads of a KV head and the S tokens are packed into the rows of one matrix product, so each cache row
// is read once for all of them; the slots are split over thread blocks that merge their (max, sum, out) through the
// distributed shared memory of a cluster (Hopper) or a workspace (before). New tokens are read from the inputs, never
// from the cache, so that no block waits for the block that writes them.
// Bytes moved: 2 * kv_len * Hkv * D * sizeof(T) of cache per sequence (once per 64 or 128 rows of S * G) + q, k, v, out.
// Measured on one H200 (docs/measurements.md): see the "Kernels" section there.
#pragma once

#include <cooperative_groups.h>

#include "tree_tile.cuh"

namespace trt_eagle3 {

constexpr int kNowhere = INT32_MIN;  // in place of a slot: past the end of the row

// What a block works on: rows [row0, row0 + Tile::Rows) of one KV head of one sequence. Row r is token r / G, head r % G.
struct TreeBlock {
  int sequence, kv_head, group, row0, rows;
  int past, first_new, kv_end;  // slot of new token 0; one past the last slot that any row sees
  int queries;                  // tokens that are not padding
};

template <typename Tile>
__device__ __forceinline__ TreeBlock tree_block(const TreeAttentionParams& p, int pair, int tile) {
  TreeBlock b;
  b.sequence = pair / p.num_kv_heads;
  b.kv_head = pair - b.sequence * p.num_kv_heads;
  b.group = p.num_heads / p.num_kv_heads;
  b.row0 = tile * Tile::Rows;
  b.rows = min(Tile::Rows, p.num_new * b.group - b.row0);
  b.past = p.past_lengths[b.sequence];
  b.queries = min(p.query_lengths[b.sequence], p.num_new);
  b.first_new = b.past + p.tail - p.num_new;
  const int last = p.mask == MaskKind::kCausal ? min(b.queries, (b.row0 + b.rows - 1) / b.group + 1) : b.queries;
  b.kv_end = min(b.first_new + last, p.pages_per_row * p.page_size);
  return b;
}

// Cache slot of slot `place` of the row, ~i for new token i, kNowhere past the end.
__device__ __forceinline__ int locate(const TreeAttentionParams& p, const TreeBlock& b, int place) {
  if (place >= b.kv_end) return kNowhere;
  if (place >= b.first_new) return ~(place - b.first_new);
  const int page = place / p.page_size;
  return __ldg(p.page_table + static_cast<int64_t>(b.sequence) * p.pages_per_row + page) * p.page_size + place -
         page * p.page_size;
}

template <typename Tile>
__device__ __forceinline__ void load_tile(const TreeAttentionParams& p, const TreeBlock& b, const int* slots,
                                          uint32_t stage) {
  using T = typename Tile::T;
  const int64_t row_elements = static_cast<int64_t>(p.num_kv_heads) * Tile::D;
#pragma unroll
  for (int i = threadIdx.x; i < Tile::Tokens * Tile::Chunks; i += Tile::Threads) {
    const int row = i / Tile::Chunks;
    const int chunk = i - row * Tile::Chunks;
    const int slot = slots[row];
    const int64_t source_row = slot >= 0 ? slot : static_cast<int64_t>(b.sequence) * p.num_new + ~slot;
    const int64_t offset = slot == kNowhere ? 0 : source_row * row_elements + b.kv_head * Tile::D + chunk * 8;
    const int bytes = slot == kNowhere ? 0 : 16;
    const uint32_t target = stage + tile_offset<Tile::D>(row, chunk, Tile::Tokens);
    copy_async16(target, static_cast<const T*>(slot >= 0 ? p.k_cache : p.k) + offset, bytes);
    copy_async16(target + Tile::KBytes, static_cast<const T*>(slot >= 0 ? p.v_cache : p.v) + offset, bytes);
  }
}

template <typename Tile>
__device__ __forceinline__ void load_queries(const TreeAttentionParams& p, const TreeBlock& b, uint32_t queries) {
  using T = typename Tile::T;
  for (int i = threadIdx.x; i < Tile::Rows * Tile::Chunks; i += Tile::Threads) {
    const int row = i / Tile::Chunks;
    const int chunk = i - row * Tile::Chunks;
    const int token = (b.row0 + row) / b.group;
    const int head = b.kv_head * b.group + (b.row0 + row) - token * b.group;
    const bool inside = row < b.rows;
    const int64_t place = (static_cast<int64_t>(b.sequence) * p.num_new + token) * p.num_heads + head;
    copy_async16(queries + tile_offset<Tile::D>(row, chunk, Tile::Rows),
                 static_cast<const T*>(p.q) + (inside ? place * Tile::D + chunk * 8 : 0), inside ? 16 : 0);
  }
}

// Writes the new tokens whose first row lies in this block's tile; the splits of the tile share them.
template <typename Tile>
__device__ __forceinline__ void write_new(const TreeAttentionParams& p, const TreeBlock& b, int split, int num_splits) {
  using T = typename Tile::T;
  const int begin = ceil_div(b.row0, b.group);
  const int end = min(ceil_div(b.row0 + b.rows, b.group), b.queries);
  const int64_t row_elements = static_cast<int64_t>(p.num_kv_heads) * Tile::D;
  for (int i = threadIdx.x;; i += Tile::Threads) {
    const int nth = i / Tile::Chunks;
    const int token = begin + split + nth * num_splits;
    const int place = b.first_new + token;
    if (token >= end || place >= p.pages_per_row * p.page_size) break;
    const int column = b.kv_head * Tile::D + (i - nth * Tile::Chunks) * 8;
    const int page = __ldg(p.page_table + static_cast<int64_t>(b.sequence) * p.pages_per_row + place / p.page_size);
    const int64_t slot = static_cast<int64_t>(page) * p.page_size + place % p.page_size;
    const int64_t source = (static_cast<int64_t>(b.sequence) * p.num_new + token) * row_elements + column;
    const int64_t target = slot * row_elements + column;
    *reinterpret_cast<uint4*>(static_cast<T*>(p.k_cache) + target) =
        __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(p.k) + source));
    *reinterpret_cast<uint4*>(static_cast<T*>(p.v_cache) + target) =
        __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(p.v) + source));
  }
}

// Sets the scores that row `row` of the block may not see to -inf.
template <int kTiles>
__device__ __forceinline__ void hide(const TreeAttentionParams& p, const TreeBlock& b, float (&scores)[kTiles][4],
                                     int row, int half, int place0) {
  const int token = (b.row0 + row) / b.group;
  const bool real = row < b.rows && token < b.queries;
  const bool causal = p.mask == MaskKind::kCausal;
  const int end = causal ? min(b.kv_end, b.first_new + token + 1) : b.past;
  const uint8_t* mask = p.tree_mask + (static_cast<int64_t>(b.sequence) * p.num_new + token) * p.tail - b.past;
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int place = place0 + j * 8 + e;
      bool seen = place < end;
      if (!causal && real && !seen && place < b.kv_end) seen = __ldg(mask + place) != 0;
      if (!seen) scores[j][2 * half + e] = -INFINITY;
    }
  }
}

// One step of the running softmax: scores become weights, out and sums are rescaled.
template <int kTiles, int kColumns>
__device__ __forceinline__ void soften(float (&scores)[kTiles][4], float (&out)[kColumns][4], float (&top)[2],
                                       float (&sum)[2], float scale_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float best = scores[0][2 * half];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) best = fmaxf(best, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
    const float new_top = fmaxf(top[half], quad_max(best) * scale_log2);
    const float base = new_top == -INFINITY ? 0.0f : new_top;
    const float shrink = exp2f(top[half] - base);
    top[half] = new_top;
    float added = 0.0f;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        scores[j][e] = exp2f(fmaf(scores[j][e], scale_log2, -base));
        added += scores[j][e];
      }
    }
    sum[half] = sum[half] * shrink + added;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      out[j][2 * half] *= shrink;
      out[j][2 * half + 1] *= shrink;
    }
  }
}

// Leaves this block's part of the result in shared memory: float out [WarpsN][Rows][PartialStride] at the start and
// float2 (max, sum) [WarpsN][Rows] at LimitsOffset.
template <typename Tile>
__device__ __forceinline__ void attend(const TreeAttentionParams& p, const TreeBlock& b, int split, int num_splits,
                                       char* shared) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int warp_m = warp % Tile::WarpsM;
  const uint32_t base = shared_address(shared);
  const uint32_t queries = base + Tile::QueryOffset;
  int* slots = reinterpret_cast<int*>(shared + Tile::SlotsOffset);
  const int num_tiles = ceil_div(b.kv_end, Tile::Tokens);
  const int begin = static_cast<int>(static_cast<int64_t>(num_tiles) * split / num_splits);
  const int end = static_cast<int>(static_cast<int64_t>(num_tiles) * (split + 1) / num_splits);

  load_queries<Tile>(p, b, queries);
  copy_async_commit();
  for (int i = threadIdx.x; i < Tile::Stages * Tile::Tokens; i += Tile::Threads) {
    slots[i] = locate(p, b, begin * Tile::Tokens + i);
  }
  __syncthreads();
#pragma unroll
  for (int stage = 0; stage < Tile::Stages - 1; ++stage) {
    if (begin + stage < end) load_tile<Tile>(p, b, slots + stage * Tile::Tokens, base + stage * Tile::StageBytes);
    copy_async_commit();
  }
  write_new<Tile>(p, b, split, num_splits);

  uint32_t query[Tile::Wgmma ? 1 : Tile::D / 16][4];
  if constexpr (!Tile::Wgmma) {
    copy_async_wait<Tile::Stages - 1>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < Tile::D / 16; ++step) load_query<Tile>(query[step], queries, warp_m * 16, step, lane);
  }
  float out[Tile::D / 8][4] = {};
  float top[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};
  const float scale_log2 = p.scale * 1.44269504088896341f;
  const int clear_end = p.mask == MaskKind::kCausal ? min(b.kv_end, b.first_new + b.row0 / b.group + 1) : b.past;

  int stage = 0;
  for (int tile = begin; tile < end; ++tile) {
    copy_async_wait<Tile::Stages - 2>();
    if constexpr (Tile::Wgmma) asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
    __syncthreads();
    const int ahead = stage == 0 ? Tile::Stages - 1 : stage - 1;
    if (tile + Tile::Stages - 1 < end) {
      load_tile<Tile>(p, b, slots + ahead * Tile::Tokens, base + ahead * Tile::StageBytes);
    }
    copy_async_commit();
    int next_slot = kNowhere;
    if (threadIdx.x < Tile::Tokens) next_slot = locate(p, b, (tile + Tile::Stages) * Tile::Tokens + threadIdx.x);

    const uint32_t keys = base + stage * Tile::StageBytes;
    float scores[Tile::WarpTokens / 8][4];
    multiply_qk<Tile>(scores, query, queries, keys, warp, lane);
    if ((tile + 1) * Tile::Tokens > clear_end) {
      const int place = tile * Tile::Tokens + (warp / Tile::WarpsM) * Tile::WarpTokens + (lane & 3) * 2;
      hide(p, b, scores, warp_m * 16 + lane / 4, 0, place);
      hide(p, b, scores, warp_m * 16 + lane / 4 + 8, 1, place);
    }
    soften(scores, out, top, sum, scale_log2);
    multiply_pv<Tile>(out, scores, keys + Tile::KBytes, warp, lane);
    if (threadIdx.x < Tile::Tokens) slots[stage * Tile::Tokens + threadIdx.x] = next_slot;
    stage = stage == Tile::Stages - 1 ? 0 : stage + 1;
  }
  copy_async_wait<0>();
  __syncthreads();

  float* partial = reinterpret_cast<float*>(shared);
  float2* limits = reinterpret_cast<float2*>(shared + Tile::LimitsOffset);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = (warp / Tile::WarpsM) * Tile::Rows + warp_m * 16 + lane / 4 + 8 * half;
    const float total = quad_sum(sum[half]);
    if ((lane & 3) == 0) limits[row] = make_float2(top[half], total);
#pragma unroll
    for (int j = 0; j < Tile::D / 8; ++j) {
      *reinterpret_cast<float2*>(partial + row * Tile::PartialStride + j * 8 + (lane & 3) * 2) =
          make_float2(out[j][2 * half], out[j][2 * half + 1]);
    }
  }
  __syncthreads();
}

}  // namespace trt_eagle3
