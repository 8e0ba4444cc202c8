// TreeAttention: writes the new keys and values into a paged cache, then attends from every new token over its row.
//
// Idea: the G query heads of a KV head and the S tokens are packed into the rows of one matrix product, so each cache
// row is read once for all of them; the slots are split over thread blocks, whose (max, sum, out) a second launch
// merges from a workspace; both come up while the launch before drains. New tokens are read from the inputs, never from
// the cache, so that no block waits for the one that writes them. Bytes moved: 2 * kv_len * Hkv * D * sizeof(T) of
// cache per sequence (once per 64 or 128 rows of S * G) + q, k, v, out. Measured on one H200: docs/measurements.md,
// "Kernels".
//
// The parts are merged in a fixed order, so the same inputs give the same bits: out = sum(w_i out_i) / sum(w_i sum_i)
// with w_i = 2^(max_i - max).
#pragma once

#include "tree_pass.cuh"

namespace trt_eagle3 {

struct Merged {
  float4 out;    // unnormalised
  float2 limit;  // max, sum
};

constexpr int kMergedAtOnce = 16;

// limit(i) -> float2 and out(i) -> float4 read part i. All parts are asked for before any is used: they may be far
// away.
template <int kMaxParts, typename Limit, typename Out>
__device__ __forceinline__ Merged merge(int num_parts, Limit limit, Out out) {
  float2 limits[kMaxParts];
  float4 outs[kMaxParts];
#pragma unroll
  for (int i = 0; i < kMaxParts; ++i) {
    const int part = i < num_parts ? i : 0;
    limits[i] = limit(part);
    outs[i] = out(part);
    if (i >= num_parts) limits[i].x = -INFINITY;
  }
  Merged m{make_float4(0.0f, 0.0f, 0.0f, 0.0f), make_float2(-INFINITY, 0.0f)};
#pragma unroll
  for (int i = 0; i < kMaxParts; ++i) m.limit.x = fmaxf(m.limit.x, limits[i].x);
  const float base = m.limit.x == -INFINITY ? 0.0f : m.limit.x;
#pragma unroll
  for (int i = 0; i < kMaxParts; ++i) {
    const float weight = fast_exp2(limits[i].x - base);
    m.limit.y += weight * limits[i].y;
    m.out.x += weight * outs[i].x;
    m.out.y += weight * outs[i].y;
    m.out.z += weight * outs[i].z;
    m.out.w += weight * outs[i].w;
  }
  return m;
}

// Stores four columns of one row; padding rows and rows that see nothing become 0.
template <typename T, int kD>
__device__ __forceinline__ void store_row(const TreeAttentionParams& p, const TreeBlock& b, int row, int column,
                                          const Merged& m) {
  const int token = token_of(p, b.row0 + row);
  const int head = b.kv_head * b.group + b.row0 + row - token * b.group;
  const float scale = token < b.queries && m.limit.y > 0.0f ? 1.0f / m.limit.y : 0.0f;
  const int64_t place = (static_cast<int64_t>(b.sequence) * p.num_new + token) * p.num_heads + head;
  const uint2 packed =
      make_uint2(pack2<T>(m.out.x * scale, m.out.y * scale), pack2<T>(m.out.z * scale, m.out.w * scale));
  *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + place * kD + column) = packed;
}

// Part of the workspace: float out [Rows][D], then float2 limit [Rows], per (pair, tile, split).
template <typename Tile>
constexpr int kWorkspacePart = Tile::Rows * (Tile::D + 2);

// grid (splits, B * Hkv, row tiles)
template <typename Tile>
__global__ void __launch_bounds__(Tile::Threads) tree_attention_kernel(const TreeAttentionParams p, float* workspace) {
  if constexpr (Tile::Wgmma && !TRT_EAGLE3_HAS_WGMMA) return;  // never launched there
  using T = typename Tile::T;
  extern __shared__ __align__(1024) char shared[];
  const bool early = p.prefetch_safe != 0;
  if (!early) wait_for_previous();
  const int split = blockIdx.x, num_splits = gridDim.x;
  const int tile = gridDim.z - 1 - blockIdx.z;  // the longest causal rows first
  TreeBlock b = tree_rows<Tile>(p, blockIdx.y, tile);
  // Where the first tiles lie, the lengths, the new tokens and the mask: asked for together. Where the cache is
  // prefetch_safe, also the first tiles themselves, before the new tokens are there.
  int first_slots[Tile::Stages];
  const auto find_slot = [&](int stage, int stride) {
    const int worker = (split + stage * stride) * Tile::Groups + threadIdx.x / Tile::GroupThreads;
    const int row = threadIdx.x % Tile::GroupThreads;
    first_slots[stage] = row < Tile::Tokens ? locate(p, b.sequence, worker * Tile::Tokens + row) : 0;
  };
  find_slot(0, 0);
  const int past = p.past_lengths[b.sequence], queries = p.query_lengths[b.sequence];
  NewTokens<Tile> tokens;
  const auto read_new = [&] {
    if (p.written == 0) tokens.read(p, b, threadIdx.x);
    pack_mask<Tile>(p, b, reinterpret_cast<uint32_t*>(shared + Tile::MaskOffset));
  };
  if (!early) read_new();
  set_lengths(p, b, past, queries);
  constexpr int kQuads = Tile::D / 4;
  float* partial = reinterpret_cast<float*>(shared);
  float2* limits = reinterpret_cast<float2*>(shared + Tile::LimitsOffset);
  if (token_of(p, b.row0) >= b.queries) {  // padding alone
    if (early) wait_for_previous();
    for (int i = threadIdx.x + split * Tile::Threads; i < b.rows * kQuads; i += num_splits * Tile::Threads) {
      store_row<T, Tile::D>(p, b, i / kQuads, i % kQuads * 4, Merged{});
    }
    return;
  }
  const int in_use = splits_in_use<Tile>(b, num_splits);
  if (split >= in_use) {  // but for its share of the new tokens there is nothing to do
    if (early) {
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
        if (!early) return;
        wait_for_previous();
        read_new();
      },
      tokens);

  const auto local_limit = [&](int row) { return [=](int i) { return limits[i * Tile::Rows + row]; }; };
  const auto local_out = [&](int row, int column) {
    return [=](int i) {
      return *reinterpret_cast<const float4*>(partial + (i * Tile::Rows + row) * Tile::PartialStride + column);
    };
  };
  const int64_t part = (static_cast<int64_t>(blockIdx.y) * gridDim.z + tile) * num_splits + split;
  float* target = workspace + part * kWorkspacePart<Tile>;
  for (int i = threadIdx.x; i < b.rows * kQuads; i += Tile::Threads) {
    const int row = i / kQuads, column = i % kQuads * 4;
    const Merged m = merge<Tile::Groups>(Tile::Groups, local_limit(row), local_out(row, column));
    if (num_splits == 1) {
      store_row<T, Tile::D>(p, b, row, column, m);
      continue;
    }
    *reinterpret_cast<float4*>(target + row * Tile::D + column) = m.out;
    if (column == 0) reinterpret_cast<float2*>(target + Tile::Rows * Tile::D)[row] = m.limit;
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
  Merged m{};
  m.limit.x = -INFINITY;
#pragma unroll 1
  for (int done = 0; done < in_use; done += kMergedAtOnce, parts += kMergedAtOnce * kWorkspacePart<Tile>) {
    const Merged more = merge<kMergedAtOnce>(
        min(in_use - done, kMergedAtOnce),
        [&](int split) {
          return reinterpret_cast<const float2*>(parts + split * kWorkspacePart<Tile> + Tile::Rows * Tile::D)[row];
        },
        [&](int split) {
          return *reinterpret_cast<const float4*>(parts + split * kWorkspacePart<Tile> + row * Tile::D + column);
        });
    m = merge<2>(
        2, [&](int i) { return i == 0 ? m.limit : more.limit; }, [&](int i) { return i == 0 ? m.out : more.out; });
  }
  store_row<typename Tile::T, Tile::D>(p, b, row, column, m);
}

}  // namespace trt_eagle3
