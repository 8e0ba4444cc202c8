// Merges the parts of TreeAttention: each part holds, per row, its maximum score, the sum of its weights, and its
// unnormalised output; the merged output is sum(w_i out_i) / sum(w_i sum_i) with w_i = 2^(max_i - max). The order is
// fixed, so the same inputs give the same bits.
#pragma once

#include "tree_attention.cuh"

namespace trt_eagle3 {

namespace cg = cooperative_groups;

struct Merged {
  float4 out;    // unnormalised
  float2 limit;  // max, sum
};

// limit(i) -> float2 and out(i) -> float4 read part i.
template <typename Limit, typename Out>
__device__ __forceinline__ Merged merge(int num_parts, Limit limit, Out out) {
  Merged m{make_float4(0.0f, 0.0f, 0.0f, 0.0f), make_float2(-INFINITY, 0.0f)};
#pragma unroll 8
  for (int i = 0; i < num_parts; ++i) m.limit.x = fmaxf(m.limit.x, limit(i).x);
  const float base = m.limit.x == -INFINITY ? 0.0f : m.limit.x;
#pragma unroll 8
  for (int i = 0; i < num_parts; ++i) {
    const float2 part = limit(i);
    const float4 o = out(i);
    const float weight = exp2f(part.x - base);
    m.limit.y += weight * part.y;
    m.out.x += weight * o.x;
    m.out.y += weight * o.y;
    m.out.z += weight * o.z;
    m.out.w += weight * o.w;
  }
  return m;
}

// Stores four columns of one row; padding rows and rows that see nothing become 0.
template <typename T, int kD>
__device__ __forceinline__ void store_row(const TreeAttentionParams& p, const TreeBlock& b, int row, int column,
                                          const Merged& m) {
  const int token = (b.row0 + row) / b.group;
  const int head = b.kv_head * b.group + (b.row0 + row) - token * b.group;
  const float scale = token < b.queries && m.limit.y > 0.0f ? 1.0f / m.limit.y : 0.0f;
  const int64_t place = (static_cast<int64_t>(b.sequence) * p.num_new + token) * p.num_heads + head;
  const uint2 packed = make_uint2(pack2<T>(m.out.x * scale, m.out.y * scale), pack2<T>(m.out.z * scale, m.out.w * scale));
  *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + place * kD + column) = packed;
}

// Part of the workspace: float out [Rows][D], then float2 limit [Rows], per (pair, tile, split).
template <typename Tile>
constexpr int kWorkspacePart = Tile::Rows * (Tile::D + 2);

// grid (splits, B * Hkv, row tiles): a tile's splits are one cluster where kCluster.
template <typename Tile, bool kCluster>
__global__ void __launch_bounds__(Tile::Threads) tree_attention_kernel(const TreeAttentionParams p, float* workspace) {
  if constexpr (Tile::Wgmma && !TRT_EAGLE3_HAS_WGMMA) return;  // never launched there
  using T = typename Tile::T;
  extern __shared__ __align__(1024) char shared[];
  const int split = blockIdx.x;
  const int num_splits = gridDim.x;
  const int tile = gridDim.z - 1 - blockIdx.z;  // the longest causal rows first
  const TreeBlock b = tree_block<Tile>(p, blockIdx.y, tile);
  constexpr int kQuads = Tile::D / 4;
  float* partial = reinterpret_cast<float*>(shared);
  float2* limits = reinterpret_cast<float2*>(shared + Tile::LimitsOffset);
  if (b.row0 / b.group >= b.queries) {  // padding alone
    for (int i = threadIdx.x + split * Tile::Threads; i < b.rows * kQuads; i += num_splits * Tile::Threads) {
      store_row<T, Tile::D>(p, b, i / kQuads, i % kQuads * 4, Merged{});
    }
    return;
  }
  attend<Tile>(p, b, split, num_splits, shared);

  const auto local_limit = [&](int row) { return [=](int i) { return limits[i * Tile::Rows + row]; }; };
  const auto local_out = [&](int row, int column) {
    return [=](int i) {
      return *reinterpret_cast<const float4*>(partial + (i * Tile::Rows + row) * Tile::PartialStride + column);
    };
  };
  if (num_splits == 1) {
    for (int i = threadIdx.x; i < b.rows * kQuads; i += Tile::Threads) {
      const int row = i / kQuads, column = i % kQuads * 4;
      store_row<T, Tile::D>(p, b, row, column, merge(Tile::WarpsN, local_limit(row), local_out(row, column)));
    }
    return;
  }
  float2* merged_limits = limits;
  if constexpr (Tile::WarpsN > 1) {
    merged_limits = limits + Tile::WarpsN * Tile::Rows;
    for (int i = threadIdx.x; i < b.rows * kQuads; i += Tile::Threads) {
      const int row = i / kQuads, column = i % kQuads * 4;
      const Merged m = merge(Tile::WarpsN, local_limit(row), local_out(row, column));
      *reinterpret_cast<float4*>(partial + row * Tile::PartialStride + column) = m.out;
      if (column == 0) merged_limits[row] = m.limit;
    }
  }
  if constexpr (kCluster) {
#if __CUDA_ARCH__ >= 900
    cg::cluster_group cluster = cg::this_cluster();
    cluster.sync();
    for (int i = threadIdx.x + split * Tile::Threads; i < b.rows * kQuads; i += num_splits * Tile::Threads) {
      const int row = i / kQuads, column = i % kQuads * 4;
      const Merged m = merge(
          num_splits, [&](int rank) { return cluster.map_shared_rank(merged_limits, rank)[row]; },
          [&](int rank) {
            const float* remote = cluster.map_shared_rank(partial, rank);
            return *reinterpret_cast<const float4*>(remote + row * Tile::PartialStride + column);
          });
      store_row<T, Tile::D>(p, b, row, column, m);
    }
    cluster.sync();  // no block may leave while another reads its shared memory
#endif
  } else {
    if constexpr (Tile::WarpsN > 1) __syncthreads();
    const int64_t part = (static_cast<int64_t>(blockIdx.y) * gridDim.z + tile) * num_splits + split;
    float* target = workspace + part * kWorkspacePart<Tile>;
    for (int i = threadIdx.x; i < b.rows * kQuads; i += Tile::Threads) {
      const int row = i / kQuads, column = i % kQuads * 4;
      *reinterpret_cast<float4*>(target + row * Tile::D + column) =
          *reinterpret_cast<const float4*>(partial + row * Tile::PartialStride + column);
    }
    float2* target_limits = reinterpret_cast<float2*>(target + Tile::Rows * Tile::D);
    for (int row = threadIdx.x; row < b.rows; row += Tile::Threads) target_limits[row] = merged_limits[row];
  }
}

// grid (blocks of a tile's outputs, B * Hkv, row tiles)
template <typename Tile>
__global__ void __launch_bounds__(256) tree_combine_kernel(const TreeAttentionParams p, const float* workspace,
                                                           int num_splits) {
  constexpr int kQuads = Tile::D / 4;
  const TreeBlock b = tree_block<Tile>(p, blockIdx.y, blockIdx.z);
  if (b.row0 / b.group >= b.queries) return;
  const int i = blockIdx.x * 256 + threadIdx.x;
  const int row = i / kQuads, column = i % kQuads * 4;
  if (row >= b.rows) return;
  const int64_t first = (static_cast<int64_t>(blockIdx.y) * gridDim.z + blockIdx.z) * num_splits;
  const float* parts = workspace + first * kWorkspacePart<Tile>;
  const Merged m = merge(
      num_splits,
      [&](int split) {
        return reinterpret_cast<const float2*>(parts + split * kWorkspacePart<Tile> + Tile::Rows * Tile::D)[row];
      },
      [&](int split) {
        return *reinterpret_cast<const float4*>(parts + split * kWorkspacePart<Tile> + row * Tile::D + column);
      });
  store_row<typename Tile::T, Tile::D>(p, b, row, column, m);
}

}  // namespace trt_eagle3
