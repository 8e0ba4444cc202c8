// TreeAttention for prompts on Hopper: many new tokens, whose keys and values are in the paged cache already.
//
// Idea: the G query heads of a KV head and the tokens are packed into tiles of 128 rows. One warpgroup gathers the
// cache's rows through the page table into a ring of stages; two begin the next tile's scores and the last tile's
// weighted sum together, and compute the softmax while the tensor cores work (FlashAttention-3, Shah et al. 2024,
// section 3.2). Blocks take units of work until there are none, the longest first, so that no multiprocessor waits for
// another; the loader is a unit ahead where the rows change. A first launch writes the new rows and finds how far each
// token sees: a causal chunk reads no mask, and nothing past its rows' diagonal.
// Bytes moved: S * G / 128 times the seen cache, out of L2. Measured: docs/measurements.md, "Kernels".
#pragma once

#include "prompt_loader.cuh"
#include "tree_loop.cuh"

namespace trt_eagle3 {

// How many slots of the tail a warp's row of the mask shows, and one past the last of them.
struct PromptShown {
  int count, end;
};

__device__ __forceinline__ PromptShown shown_of(const uint8_t* row, int tail) {
  const int lane = threadIdx.x % 32;
  int count = 0, end = 0;
  const auto add = [&](uint32_t four, int column) {
    const uint32_t set = __vsetne4(four, 0);
    count += __popc(set);
    if (set != 0) end = column + 4 - __clz(set) / 8;
  };
  const int packs = tail % 16 == 0 && reinterpret_cast<uintptr_t>(row) % 16 == 0 ? tail / 16 : 0;
#pragma unroll 4
  for (int i = lane; i < packs; i += 32) {
    const uint4 pack = reinterpret_cast<const uint4*>(row)[i];
    add(pack.x, 16 * i);
    add(pack.y, 16 * i + 4);
    add(pack.z, 16 * i + 8);
    add(pack.w, 16 * i + 12);
  }
  for (int i = 16 * packs + lane; i < tail; i += 32) {
    if (row[i] != 0) ++count, end = i + 1;
  }
  return {static_cast<int>(__reduce_add_sync(0xffffffffu, count)), __reduce_max_sync(0xffffffffu, end)};
}

// grid (N / Warps): writes the new tokens to the cache, a warp each, and how far each sees to the workspace. A row of
// the mask that shows a beginning of the tail and nothing behind it is a limit; of any other the attention reads the
// mask.
template <typename T, bool kFp8, int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
    prompt_write_kernel(const TreeAttentionParams p, const PromptWorkspace workspace, int row_packs) {
  wait_for_previous();
  const int index = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (blockIdx.x == 0 && threadIdx.x == 0) *workspace.next = 0;
  if (index >= p.batch * p.num_new) return;
  const int sequence = index / p.num_new;
  const int token = index - sequence * p.num_new;
  const int past = p.past_lengths[sequence], capacity = p.pages_per_row * p.page_size;
  const int position = past + p.tail - p.num_new + token;
  const int queries = min(p.query_lengths[sequence], p.num_new);
  const bool real = token < queries;
  if (real && position < capacity) {
    const int64_t target = static_cast<int64_t>(cache_slot(p, sequence, position)) * row_packs;
    const int64_t source = static_cast<int64_t>(index) * row_packs;
    constexpr int kAtOnce = 4;  // packs of a lane, read before any is written
    for (int start = lane; start < row_packs; start += 32 * kAtOnce) {
      uint4 keys[kAtOnce], values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t pack = source + min(start + 32 * i, row_packs - 1);
        keys[i] = static_cast<const uint4*>(p.k)[pack];
        values[i] = static_cast<const uint4*>(p.v)[pack];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce && start + 32 * i < row_packs; ++i) {
        const int pack = start + 32 * i, kv_head = kFp8 ? pack / (p.head_dim / 8) : 0;
        store_eight<T, kFp8>(p.k_cache, target + pack, keys[i], kv_scale<kFp8>(p, 0, kv_head));
        store_eight<T, kFp8>(p.v_cache, target + pack, values[i], kv_scale<kFp8>(p, 1, kv_head));
      }
    }
  }
  const int own = p.tail - p.num_new + token + 1;
  PromptShown shown{own, own};
  if (p.mask != MaskKind::kCausal) shown = shown_of(p.tree_mask + static_cast<int64_t>(index) * p.tail, p.tail);
  const int limit = min(past + min(shown.end, p.tail - p.num_new + queries), capacity);
  if (lane == 0) workspace.limits[index] = !real ? 0 : shown.count == shown.end ? limit : -1;
}

#if TRT_EAGLE3_HAS_WGMMA

// A warp's 16 rows of the queries, as the A operand of each step of 16 columns.
template <typename Tile>
using PromptQueries = uint32_t[Tile::D / 16][4];

template <typename Tile>
__device__ __forceinline__ void start_prompt_scores(float (&scores)[Tile::Tokens / 8][4],
                                                    const PromptQueries<Tile>& queries, uint32_t keys) {
  wgmma_pin(scores);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Tile::D / 16; ++step) {
    const uint64_t b = wgmma_descriptor(keys + (step >> 2) * Tile::Tokens * 128 + (step & 3) * 32, 16);
    wgmma_rs_rows<typename Tile::T>(scores, queries[step], b, step != 0);
  }
  wgmma_commit();
}

template <typename Tile>
__device__ __forceinline__ void start_prompt_sums(float (&sums)[Tile::D / 8][4],
                                                  const uint32_t (&weights)[Tile::Tokens / 16][4], uint32_t values) {
  wgmma_pin(sums);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Tile::Tokens / 16; ++step) {
    wgmma_rs<typename Tile::T>(sums, weights[step], wgmma_descriptor(values + step * 2048, Tile::Tokens * 128), 1);
  }
  wgmma_commit();
}

// A thread's two rows of a unit.
struct PromptRows {
  int token[2], limit[2];  // limit: 0 for rows that do not exist and for padding
  int first_masked;        // tiles before it are seen whole by all rows of the warp
};

template <typename Tile>
struct PromptConsumer {
  const TreeAttentionParams& p;
  const PromptWorkspace& workspace;
  const PromptRing<Tile>& ring;
  const volatile PromptWork* place;
  int row_tiles;

  using Scores = float[Tile::Tokens / 8][4];
  using Sums = float[Tile::D / 8][4];
  using Weights = uint32_t[Tile::Tokens / 16][4];

  // This thread's row of the block, of its two.
  __device__ __forceinline__ int row_of(int half) const {
    return (threadIdx.x - 128) / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
  }
  __device__ __forceinline__ void leave(uint32_t barrier) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  }

  // Turns are two numbered barriers of both warpgroups: one waits for its own, at which the other arrives.
  __device__ __forceinline__ void await_turn() const {
    if constexpr (!Tile::InTurn) return;
    if (threadIdx.x < 256) {
      named_barrier(4, 256);
    } else {
      named_barrier(5, 256);
    }
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (!Tile::InTurn) return;
    if (threadIdx.x < 256) {
      asm volatile("bar.arrive 5, 256;\n" ::: "memory");
    } else {
      asm volatile("bar.arrive 4, 256;\n" ::: "memory");
    }
  }

  __device__ __forceinline__ PromptRows find_rows(const TreeBlock& b, bool by_limits) const {
    PromptRows rows;
    int least = INT32_MAX;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(half);
      rows.token[half] = token_of(p, b.row0 + min(row, b.rows - 1));
      const int limit = workspace.limits[b.sequence * p.num_new + rows.token[half]];
      rows.limit[half] = row < b.rows ? limit : 0;
      least = min(least, rows.limit[half]);
    }
    least = __reduce_min_sync(0xffffffffu, least);
    rows.first_masked = (by_limits ? least : min(least < 0 ? INT32_MAX : least, p.past_lengths[b.sequence])) / 128;
    return rows;
  }

  // Of a thread's 32 columns of a tile in a row, which it sees: bit 2 j + e is column 8 j + e after `column`.
  __device__ __forceinline__ uint32_t seen_up_to(int limit, int column) const {
    const int left = limit - column, count = (left >> 3) * 2 + min(left & 7, 2);
    return left <= 0 ? 0 : count >= 32 ? ~0u : (1u << count) - 1;
  }

  // The same of a row of the mask that is no limit: rare, and slow.
  __device__ __forceinline__ uint32_t seen_by_mask(const TreeBlock& b, int token, int column) const {
    const int past = p.past_lengths[b.sequence];
    const int end = p.tail - p.num_new + min(p.query_lengths[b.sequence], p.num_new);
    const uint8_t* row = p.tree_mask + (static_cast<int64_t>(b.sequence) * p.num_new + token) * p.tail;
    uint32_t seen = 0;
#pragma unroll 1
    for (int i = 0; i < 32; ++i) {
      const int place = column + i / 2 * 8 + i % 2 - past;
      if (place < 0 || (place < end && row[place] != 0)) seen |= 1u << i;
    }
    return seen;
  }

  __device__ __forceinline__ void mask(Scores& scores, const TreeBlock& b, const PromptRows& rows, int tile) const {
    if (tile < rows.first_masked) return;
    const int column = tile * Tile::Tokens + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int limit = rows.limit[half];
      const uint32_t seen = limit >= 0 ? seen_up_to(limit, column) : seen_by_mask(b, rows.token[half], column);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        float& score = scores[i / 2][2 * half + i % 2];
        score = seen >> i & 1 ? score : -INFINITY;
      }
    }
  }

  __device__ __forceinline__ void pack(Weights& weights, const Scores& scores) const {
#pragma unroll
    for (int step = 0; step < Tile::Tokens / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&four)[4] = scores[2 * step + i / 2];
        weights[step][i] = pack2<typename Tile::T>(four[i % 2 * 2], four[i % 2 * 2 + 1]);
      }
    }
  }

  // Divides and writes the rows. The four lanes of a row exchange words, so that each has 16 bytes of every fourth
  // tile.
  __device__ __forceinline__ void write(const TreeBlock& b, const PromptRows& rows, const Sums& sums,
                                        const OnlineSoftmax& softmax) const {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(half), token = rows.token[half];
      const float d = quad_sum(softmax.d[half]);
      const float scale = rows.limit[half] != 0 && d > 0.0f ? b.v_scale / d : 0.0f;
      const int head = b.kv_head * b.group + b.row0 + row - token * b.group;
      const int64_t head_row = (static_cast<int64_t>(b.sequence) * p.num_new + token) * p.num_heads + head;
      uint4* target = reinterpret_cast<uint4*>(static_cast<typename Tile::T*>(p.out) + head_row * Tile::D);
#pragma unroll
      for (int j = 0; j < Tile::D / 8; j += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          words[i] = pack2<typename Tile::T>(sums[j + i][2 * half] * scale, sums[j + i][2 * half + 1] * scale);
        }
        transpose_quad(words, lane);
        if (row < b.rows) target[j + lane] = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }

  // Lane i of each four gets word i of all of them, in their order.
  static __device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int lane) {
#pragma unroll
    for (int bit = 2; bit > 0; bit /= 2) {
      const bool high = lane & bit;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & bit) continue;
        const uint32_t sent = high ? words[i] : words[i + bit];
        const uint32_t got = __shfl_xor_sync(0xffffffffu, sent, bit);
        words[i] = high ? got : words[i];
        words[i + bit] = high ? words[i + bit] : got;
      }
    }
  }

  // One unit, whose first tile is the `count`th of this block.
  __device__ __forceinline__ void multiply(const PromptWork& work, int count, int done) const {
    const TreeBlock b = prompt_rows<Tile>(p, work.index, row_tiles);
    const PromptRows rows = find_rows(b, work.by_limits);
    Scores scores;
    Sums sums = {};
    OnlineSoftmax softmax;
    if (work.num_tiles == 0) {
      barrier_wait(ring.queries_full(), done & 1);
      leave(ring.work_empty());
      write(b, rows, sums, softmax);
      return;
    }
    const float scale_log2 = p.scale * b.k_scale * 1.44269504088896341f;
    Weights weights;
    PromptQueries<Tile> queries;
    barrier_wait(ring.queries_full(), done & 1);
#pragma unroll
    for (int step = 0; step < Tile::D / 16; ++step) {
      load_query<Tile>(queries[step], ring.queries(), (threadIdx.x - 128) / 32 * 16, step, threadIdx.x % 32);
    }
    leave(ring.work_empty());
    barrier_wait(ring.full(0, count), ring.phase(count));
    start_prompt_scores<Tile>(scores, queries, ring.stage(0, count));
    wgmma_wait<0>();
    wgmma_pin(scores);
    leave(ring.empty(0, count));
    mask(scores, b, rows, work.num_tiles - 1);
    softmax.update(scores, scale_log2);
    pack(weights, scores);
#pragma unroll 1
    for (int tile = work.num_tiles - 2; tile >= 0; --tile, ++count) {
      barrier_wait(ring.full(0, count + 1), ring.phase(count + 1));
      barrier_wait(ring.full(1, count), ring.phase(count));
      await_turn();
      start_prompt_scores<Tile>(scores, queries, ring.stage(0, count + 1));
      start_prompt_sums<Tile>(sums, weights, ring.stage(1, count));
      pass_turn();
      wgmma_wait<1>();
      wgmma_pin(scores);
      leave(ring.empty(0, count + 1));
      mask(scores, b, rows, tile);
      softmax.update(scores, scale_log2);
      // Sums of weights are never negative. The branch keeps ptxas from moving the wait before the softmax, which then
      // would not run under the products.
      if (softmax.d[0] + softmax.d[1] < 0.0f) asm volatile("brkpt;\n");
      wgmma_wait<0>();
      wgmma_pin(sums);
      leave(ring.empty(1, count));
      softmax.rescale_all(sums);
      pack(weights, scores);
    }
    barrier_wait(ring.full(1, count), ring.phase(count));
    start_prompt_sums<Tile>(sums, weights, ring.stage(1, count));
    wgmma_wait<0>();
    wgmma_pin(sums);
    leave(ring.empty(1, count));
    write(b, rows, sums, softmax);
  }

  __device__ __forceinline__ void run() const {
    int count = 0;
    if (threadIdx.x >= 256) pass_turn();  // the other one is first
    for (int done = 0;; ++done) {
      barrier_wait(ring.work_full(), done & 1);
      const PromptWork work{place->index, place->num_tiles, place->by_limits};
      if (work.index < 0) return;
      multiply(work, count, done);
      count += work.num_tiles;
    }
  }
};

#endif

// grid: blocks that take units of work, of which there are num_work, until none is left.
template <typename Tile>
__global__ void __launch_bounds__(Tile::Threads, 1)
    prompt_attention_kernel(const TreeAttentionParams p, const PromptWorkspace workspace,
                            const __grid_constant__ PromptMaps maps, int num_work, int row_tiles) {
#if TRT_EAGLE3_HAS_WGMMA
  extern __shared__ __align__(1024) char shared[];
  const PromptRing<Tile> ring{shared_address(shared)};
  if (threadIdx.x == 0) ring.init();
  __syncthreads();
  wait_for_previous();
  if (threadIdx.x < 128) {
    give_registers<Tile::LoaderRegisters>();
    PromptLoader<Tile>{p, workspace, maps, ring, shared, num_work, row_tiles}.run();
  } else {
    take_registers<Tile::ConsumerRegisters>();
    const auto* place = reinterpret_cast<const volatile PromptWork*>(shared + Tile::WorkOffset);
    PromptConsumer<Tile>{p, workspace, ring, place, row_tiles}.run();
  }
#endif
}

}  // namespace trt_eagle3
