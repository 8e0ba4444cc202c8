// VisionAttention by mma.sync, for chips before Hopper (and those after): 64 queries a block, tiles of 64 patches.
#pragma once

#include "vision_pack.cuh"
#include "vision_softmax.cuh"

namespace trt_eagle3 {

template <typename Element, int kHeadDim>
struct VisionMmaTile {
  using T = Element;
  static constexpr int D = kHeadDim;
  static constexpr int Rows = 64;
  static constexpr int Tokens = 64;
  static constexpr int Threads = 128;
  static constexpr int Steps = ceil_div(D, 16);
  static constexpr int GroupBytes = group_bytes(D);
  static constexpr int SumTiles = D / 8 + 1;  // the denominators' column included
  static constexpr int TileGroups = Tokens / kCorePatches;
  static constexpr int TileBytes = TileGroups * GroupBytes;
  static constexpr int StageBytes = 2 * TileBytes;
  static constexpr int QueryOffset = 2 * StageBytes;
  static constexpr int SharedBytes = QueryOffset + TileBytes;
};

// Starts the copy of `groups` of a tile's 8 groups; the rest become zeros.
template <typename Tile>
__device__ __forceinline__ void copy_groups(uint32_t target, const char* source, int groups) {
  for (int i = threadIdx.x * 16; i < Tile::TileBytes; i += Tile::Threads * 16) {
    const bool held = i < groups * Tile::GroupBytes;
    copy_async16(target + i, source + (held ? i : 0), held ? 16 : 0);
  }
}

template <typename Tile>
__device__ __forceinline__ void multiply_keys(float (&scores)[Tile::Tokens / 8][4],
                                              const uint32_t (&query)[Tile::Steps][4], uint32_t keys, int lane) {
#pragma unroll
  for (int j = 0; j < Tile::Tokens / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[j][e] = 0.0f;
  }
  const uint32_t row = keys + (lane >> 4) * Tile::GroupBytes + (lane >> 3 & 1) * kCoreBytes + (lane & 7) * 16;
#pragma unroll
  for (int step = 0; step < Tile::Steps; ++step) {
#pragma unroll
    for (int pair = 0; pair < Tile::Tokens / 16; ++pair) {
      uint32_t b[4];
      load_matrix4(b, row + pair * 2 * Tile::GroupBytes + step * 2 * kCoreBytes);
      mma<typename Tile::T>(scores[2 * pair], query[step], b[0], b[1]);
      mma<typename Tile::T>(scores[2 * pair + 1], query[step], b[2], b[3]);
    }
  }
}

template <typename Tile>
__device__ __forceinline__ void multiply_values(float (&sums)[Tile::SumTiles][4],
                                                const uint32_t (&weights)[Tile::Tokens / 16][4], uint32_t values,
                                                int lane) {
  const uint32_t row = values + (lane >> 3 & 1) * Tile::GroupBytes + (lane >> 4) * kCoreBytes + (lane & 7) * 16;
#pragma unroll
  for (int step = 0; step < Tile::Tokens / 16; ++step) {
    const uint32_t groups = row + step * 2 * Tile::GroupBytes;
    uint32_t b[4];
#pragma unroll
    for (int pair = 0; pair < Tile::SumTiles / 2; ++pair) {
      load_matrix4_transposed(b, groups + pair * 2 * kCoreBytes);
      mma<typename Tile::T>(sums[2 * pair], weights[step], b[0], b[1]);
      mma<typename Tile::T>(sums[2 * pair + 1], weights[step], b[2], b[3]);
    }
    if constexpr (Tile::SumTiles % 2 == 1) {  // the last chunk alone; its second half would be the next group's
      load_matrix4_transposed(b, groups + (Tile::SumTiles - 1) * kCoreBytes - (lane >> 4) * kCoreBytes);
      mma<typename Tile::T>(sums[Tile::SumTiles - 1], weights[step], b[0], b[1]);
    }
  }
}

// grid (tiles of Rows patches over all frames, heads).
template <typename Tile>
__global__ void __launch_bounds__(Tile::Threads)
    vision_mma_kernel(const VisionAttentionParams p, const PackedVision packed) {
  using T = typename Tile::T;
  extern __shared__ __align__(128) char shared[];
  const uint32_t base = shared_address(shared);
  wait_for_previous();
  const VisionFrame frame = find_frame(p, blockIdx.x, Tile::Rows);
  if (frame.length == 0) return;
  const int row0 = frame.tile * Tile::Rows, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int groups = ceil_div(frame.length, kCorePatches);
  const int64_t offset = (static_cast<int64_t>(head) * packed.groups + frame.group) * Tile::GroupBytes;
  const int tiles = ceil_div(groups, Tile::TileGroups);
  const auto copy_tile = [&](int tile) {
    const int64_t from = offset + static_cast<int64_t>(tile) * Tile::TileBytes;
    const uint32_t stage = base + tile % 2 * Tile::StageBytes;
    copy_groups<Tile>(stage, packed.k + from, groups - tile * Tile::TileGroups);
    copy_groups<Tile>(stage + Tile::TileBytes, packed.v + from, groups - tile * Tile::TileGroups);
    copy_async_commit();
  };
  copy_groups<Tile>(base + Tile::QueryOffset, packed.q + offset + row0 / kCorePatches * Tile::GroupBytes,
                    groups - row0 / kCorePatches);
  copy_tile(0);

  const float scale_log2 = p.scale * 1.44269504f;
  float scores[Tile::Tokens / 8][4], sums[Tile::SumTiles][4] = {}, rescale[2];
  uint32_t query[Tile::Steps][4], weights[Tile::Tokens / 16][4];
  RunningMax running;
  for (int tile = 0; tile < tiles; ++tile) {
    copy_async_wait<0>();
    __syncthreads();
    if (tile + 1 < tiles) copy_tile(tile + 1);
    if (tile == 0) {
      const uint32_t row = base + Tile::QueryOffset + (2 * warp + (lane >> 3 & 1)) * Tile::GroupBytes +
                           (lane >> 4) * kCoreBytes + (lane & 7) * 16;
#pragma unroll
      for (int step = 0; step < Tile::Steps; ++step) load_matrix4(query[step], row + step * 2 * kCoreBytes);
    }
    const uint32_t stage = base + tile % 2 * Tile::StageBytes;
    multiply_keys<Tile>(scores, query, stage, lane);
    if (tile + 1 == tiles) mask_scores(scores, frame.length - tile * Tile::Tokens, lane);
    update_softmax(scores, running, scale_log2, rescale);
    rescale_rows(sums, rescale);
    pack_weights<T>(weights, scores);
    multiply_values<Tile>(sums, weights, stage + Tile::TileBytes, lane);
  }

  const int row = row0 + warp * 16;
  const int64_t row_size = static_cast<int64_t>(p.num_heads) * Tile::D;
  T* out = static_cast<T*>(p.out) + (frame.start + row) * row_size + head * Tile::D;
  write_rows(out, row_size, frame.length - row, sums, lane);
}

}  // namespace trt_eagle3
