// TreeAttention: writes the new keys and values into a paged cache, then attends from every new token over its row.
//
// Idea: the G query heads of a KV head and the S tokens are packed into the rows of one matrix product, so each cache
// row is read once for all of them; the slots are split over thread blocks, whose states (m, d, out) a second launch
// merges from a workspace; both come up while the launch before drains. New tokens are read from the inputs, never from
// the cache, so that no block waits for the one that writes them. Bytes moved: 2 * kv_len * Hkv * D * sizeof(T) of
// cache per sequence (once per 64 or 128 rows of S * G) + q, k, v, out. Measured on one H200: docs/measurements.md,
// "Kernels".
//
// The parts are merged in a fixed order, so the same inputs give the same bits: out = sum(w_i out_i) / sum(w_i d_i)
// with w_i = 2^(m_i - m).
#pragma once

#include "tree_loop.cuh"

namespace trt_eagle3 {

// Four columns of a row's attention over some of its slots; states over disjoint slots can be merged.
struct AttentionState {
  float4 out;  // not yet divided by d
  float2 md;   // running maximum m of the scores, denominator d = sum of 2^(score - m)
};

constexpr int kStatesAtOnce = 16;

// md(i) -> float2 and out(i) -> float4 read part i. All parts are asked for before any is used: they may be far
// away.
template <int kMaxParts, typename ReadMd, typename ReadOut>
__device__ __forceinline__ AttentionState merge_states(int num_parts, ReadMd md, ReadOut out) {
  float2 mds[kMaxParts];
  float4 outs[kMaxParts];
#pragma unroll
  for (int i = 0; i < kMaxParts; ++i) {
    const int part = i < num_parts ? i : 0;
    mds[i] = md(part);
    outs[i] = out(part);
    if (i >= num_parts) mds[i].x = -INFINITY;
  }
  AttentionState state{make_float4(0.0f, 0.0f, 0.0f, 0.0f), make_float2(-INFINITY, 0.0f)};
#pragma unroll
  for (int i = 0; i < kMaxParts; ++i) state.md.x = fmaxf(state.md.x, mds[i].x);
  const float base = state.md.x == -INFINITY ? 0.0f : state.md.x;
#pragma unroll
  for (int i = 0; i < kMaxParts; ++i) {
    const float weight = fast_exp2(mds[i].x - base);
    state.md.y += weight * mds[i].y;
    state.out.x += weight * outs[i].x;
    state.out.y += weight * outs[i].y;
    state.out.z += weight * outs[i].z;
    state.out.w += weight * outs[i].w;
  }
  return state;
}

// Stores four columns of one row; padding rows and rows that see nothing become 0.
template <typename Tile>
__device__ __forceinline__ void store_row(const TreeAttentionParams& p, const TreeBlock& b, int row, int column,
                                          const AttentionState& state) {
  const int token = token_of(p, b.row0 + row);
  const int head = b.kv_head * b.group + b.row0 + row - token * b.group;
  using T = typename Tile::T;
  const float scale = token < b.queries && state.md.y > 0.0f ? b.v_scale / state.md.y : 0.0f;
  const int64_t head_row = (static_cast<int64_t>(b.sequence) * p.num_new + token) * p.num_heads + head;
  const uint2 packed = make_uint2(pack2<T>(state.out.x * scale, state.out.y * scale),
                                  pack2<T>(state.out.z * scale, state.out.w * scale));
  *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + head_row * Tile::D + column) = packed;
}

// Part of the workspace: float out [Rows][D], then float2 md [Rows], per (pair, tile, split).
template <typename Tile>
constexpr int kWorkspacePart = Tile::Rows * (Tile::D + 2);

// grid (splits, B * Hkv, row tiles)
template <typename Tile>
__global__ void __launch_bounds__(Tile::Threads) tree_attention_kernel(const TreeAttentionParams p, float* workspace) {
  if constexpr (Tile::Wgmma && !TRT_EAGLE3_HAS_WGMMA) return;  // never launched there
  extern __shared__ __align__(1024) char shared[];
  const bool prefetch = p.prefetch_safe != 0;
  if (!prefetch) wait_for_previous();
  const int split = blockIdx.x, num_splits = gridDim.x;
  const int tile = gridDim.z - 1 - blockIdx.z;  // the longest causal rows first
  TreeBlock b = tree_rows<Tile>(p, blockIdx.y, tile);
  // Where the first tiles lie, the lengths, the new tokens and the mask: asked for together. Where the cache is
  // prefetch_safe, also the first tiles themselves, before the new tokens are there.
  int first_slots[Tile::Stages];
  const auto find_slot = [&](int stage, int stride) {
    const int worker =
        first_tile<Tile>(b) + (split + stage * stride) * Tile::Groups + threadIdx.x / Tile::GroupThreads;
    const int row = threadIdx.x % Tile::GroupThreads;
    first_slots[stage] = row < Tile::Tokens ? cache_slot(p, b.sequence, worker * Tile::Tokens + row) : 0;
  };
  find_slot(0, 0);
  const int past = p.past_lengths[b.sequence], queries = p.query_lengths[b.sequence];
  NewTokens<Tile> tokens;
  const auto read_new = [&] {
    if (p.written == 0) tokens.read(p, b, threadIdx.x);
    pack_mask<Tile>(p, b, reinterpret_cast<uint32_t*>(shared + Tile::MaskOffset));
  };
  if (!prefetch) read_new();
  set_lengths(p, b, past, queries);
  constexpr int kQuads = Tile::D / 4;
  float* partial = reinterpret_cast<float*>(shared);
  float2* mds = reinterpret_cast<float2*>(shared + Tile::StatesOffset);
  if (token_of(p, b.row0) >= b.queries) {  // padding alone
    if (prefetch) wait_for_previous();
    for (int i = threadIdx.x + split * Tile::Threads; i < b.rows * kQuads; i += num_splits * Tile::Threads) {
      store_row<Tile>(p, b, i / kQuads, i % kQuads * 4, AttentionState{});
    }
    return;
  }
  if (b.kv_begin > 0) find_slot(0, 0);  // the first lookup took the lengths for 0
  const int in_use = splits_in_use<Tile>(b, num_splits);
  if (split >= in_use) {  // but for its share of the new tokens there is nothing to do
    if (prefetch) {
      wait_for_previous();
      read_new();
    }
    if (p.written == 0) tokens.write(p, b);
    return;
  }
#pragma unroll
  for (int stage = 1; stage < Tile::Stages; ++stage) find_slot(stage, in_use);
  attend<Tile>(
      p, b, split, in_use, first_slots, shared,
      [&] {
        if (!prefetch) return;
        wait_for_previous();
        read_new();
      },
      tokens);

  const auto local_md = [&](int row) { return [=](int i) { return mds[i * Tile::Rows + row]; }; };
  const auto local_out = [&](int row, int column) {
    return [=](int i) {
      return *reinterpret_cast<const float4*>(partial + (i * Tile::Rows + row) * Tile::PartialStride + column);
    };
  };
  const int64_t part = (static_cast<int64_t>(blockIdx.y) * gridDim.z + tile) * num_splits + split;
  float* target = workspace + part * kWorkspacePart<Tile>;
  for (int i = threadIdx.x; i < b.rows * kQuads; i += Tile::Threads) {
    const int row = i / kQuads, column = i % kQuads * 4;
    const AttentionState state = merge_states<Tile::Groups>(Tile::Groups, local_md(row), local_out(row, column));
    if (num_splits == 1) {
      store_row<Tile>(p, b, row, column, state);
      continue;
    }
    *reinterpret_cast<float4*>(target + row * Tile::D + column) = state.out;
    if (column == 0) reinterpret_cast<float2*>(target + Tile::Rows * Tile::D)[row] = state.md;
  }
}

// grid (blocks of a tile's outputs, B * Hkv, row tiles)
template <typename Tile>
__global__ void __launch_bounds__(256)
    tree_combine_kernel(const TreeAttentionParams p, const float* workspace, int num_splits) {
  constexpr int kQuads = Tile::D / 4;
  TreeBlock b = tree_rows<Tile>(p, blockIdx.y, blockIdx.z);
  set_lengths(p, b, p.past_lengths[b.sequence], p.query_lengths[b.sequence]);
  const int i = blockIdx.x * 256 + threadIdx.x;
  const int row = i / kQuads, column = i % kQuads * 4;
  // What was read above is older than the kernel before, which has waited for it. Where a block has few rows, the next
  // launch does better to come up before this one has waited (measured: 28.1 -> 26.1 us at 16k; with more, 29.3
  // -> 31.4).
  if constexpr (Tile::Rows <= 16) {
    wait_for_previous_beside_next();
  } else {
    wait_for_previous();
  }
  if (row >= b.rows || token_of(p, b.row0) >= b.queries) return;
  const int64_t first = (static_cast<int64_t>(blockIdx.y) * gridDim.z + blockIdx.z) * num_splits;
  const int in_use = splits_in_use<Tile>(b, num_splits);
  const float* parts = workspace + first * kWorkspacePart<Tile>;
  AttentionState state{};
  state.md.x = -INFINITY;
#pragma unroll 1
  for (int done = 0; done < in_use; done += kStatesAtOnce, parts += kStatesAtOnce * kWorkspacePart<Tile>) {
    const AttentionState more = merge_states<kStatesAtOnce>(
        min(in_use - done, kStatesAtOnce),
        [&](int split) {
          return reinterpret_cast<const float2*>(parts + split * kWorkspacePart<Tile> + Tile::Rows * Tile::D)[row];
        },
        [&](int split) {
          return *reinterpret_cast<const float4*>(parts + split * kWorkspacePart<Tile> + row * Tile::D + column);
        });
    state = merge_states<2>(
        2, [&](int i) { return i == 0 ? state.md : more.md; }, [&](int i) { return i == 0 ? state.out : more.out; });
  }
  store_row<Tile>(p, b, row, column, state);
}

}  // namespace trt_eagle3
