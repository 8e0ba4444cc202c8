// VisionAttention on Hopper: a block of 64 queries per warpgroup passes over its frame's packed keys and values.
//
// Idea: tiles of 128 patches (64 where heads are wide) come by bulk copies into a ring of stages. Each warpgroup begins the next tile's scores
// and the last tile's weighted sum together, and computes the softmax while the tensor cores work: FlashAttention-3's
// overlap within a warpgroup (Shah et al. 2024, section 3.2). The warpgroups drift apart, so one's softmax runs under
// another's products. The frame's last tile comes first, so that only the prologue masks.
// Bytes moved: n / Rows times the frame's keys and values, out of L2. Measured: docs/measurements.md, "Images".
#pragma once

#include "barrier.cuh"
#include "vision_pack.cuh"
#include "vision_softmax.cuh"
#include "wgmma.cuh"

namespace trt_eagle3 {

template <typename Element, int kHeadDim, int kWarpgroups, int kStages>
struct VisionTile {
  using T = Element;
  static constexpr int D = kHeadDim;
  static constexpr int Warpgroups = kWarpgroups;
  static constexpr int Stages = kStages;
  static constexpr int Rows = 64 * kWarpgroups;
  static constexpr int Tokens = D > 80 ? 64 : 128;  // four stages of wide heads fill shared memory
  static constexpr int Threads = 128 * kWarpgroups;
  static constexpr int Steps = ceil_div(D, 16);  // of a product over channels
  static constexpr int GroupBytes = group_bytes(D);
  static constexpr int SumTiles = D / 8 + 1;  // the denominators' column included
  static constexpr int TileGroups = Tokens / kCorePatches;
  static constexpr int TileBytes = TileGroups * GroupBytes;
  static constexpr int StageBytes = 2 * TileBytes;
  static constexpr int QueryOffset = Stages * StageBytes;
  static constexpr int BarrierOffset = QueryOffset + Rows / kCorePatches * GroupBytes;
  static constexpr int SharedBytes = BarrierOffset + (2 * Stages + 1) * 8;
};

#if TRT_EAGLE3_HAS_WGMMA

// Addresses of a block's barriers: a stage is full when its copies have come, empty when every warpgroup has read it.
template <typename Tile>
struct VisionRing {
  uint32_t base;

  __device__ __forceinline__ uint32_t stage(int i) const { return base + i * Tile::StageBytes; }
  __device__ __forceinline__ uint32_t queries() const { return base + Tile::QueryOffset; }
  __device__ __forceinline__ uint32_t full(int i) const { return base + Tile::BarrierOffset + i * 8; }
  __device__ __forceinline__ uint32_t empty(int i) const { return full(Tile::Stages + i); }
  __device__ __forceinline__ uint32_t queries_full() const { return full(2 * Tile::Stages); }
};

// What a block reads: one head of one frame; tile i of the pass is the frame's tile `tiles - 1 - i`.
struct VisionSource {
  const char* k;
  const char* v;
  int tiles, groups;
};

template <typename Tile>
__device__ __forceinline__ void start_copy(const VisionRing<Tile>& ring, const VisionSource& source, int i) {
  const int stage = i % Tile::Stages, tile = source.tiles - 1 - i;
  const int groups = min(Tile::TileGroups, source.groups - tile * Tile::TileGroups);
  const int bytes = groups * Tile::GroupBytes;
  const int64_t offset = static_cast<int64_t>(tile) * Tile::TileBytes;
  barrier_expect(ring.full(stage), 2 * bytes);
  copy_bulk(ring.stage(stage), source.k + offset, bytes, ring.full(stage));
  copy_bulk(ring.stage(stage) + Tile::TileBytes, source.v + offset, bytes, ring.full(stage));
}

template <typename Tile>
__device__ __forceinline__ void start_scores(float (&scores)[Tile::Tokens / 8][4], uint32_t queries, uint32_t keys) {
  wgmma_pin(scores);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Tile::Steps; ++step) {
    const uint64_t a = wgmma_core_descriptor(queries + step * 2 * kCoreBytes, kCoreBytes, Tile::GroupBytes);
    const uint64_t b = wgmma_core_descriptor(keys + step * 2 * kCoreBytes, kCoreBytes, Tile::GroupBytes);
    wgmma_ss<typename Tile::T>(scores, a, b, step != 0);
  }
  wgmma_commit();
}

template <typename Tile>
__device__ __forceinline__ void start_sums(float (&sums)[Tile::SumTiles][4],
                                           const uint32_t (&weights)[Tile::Tokens / 16][4], uint32_t values) {
  wgmma_pin(sums);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Tile::Tokens / 16; ++step) {
    const uint64_t b = wgmma_core_descriptor(values + step * 2 * Tile::GroupBytes, Tile::GroupBytes, kCoreBytes);
    wgmma_rs<typename Tile::T>(sums, weights[step], b, 1);
  }
  wgmma_commit();
}

#endif

// grid (tiles of Rows patches over all frames, heads).
template <typename Tile>
__global__ void __launch_bounds__(Tile::Threads, 1)
    vision_wgmma_kernel(const VisionAttentionParams p, const PackedVision packed) {
#if TRT_EAGLE3_HAS_WGMMA
  using T = typename Tile::T;
  extern __shared__ __align__(128) char shared[];
  const VisionRing<Tile> ring{shared_address(shared)};
  wait_for_previous();
  const VisionFrame frame = find_frame(p, blockIdx.x, Tile::Rows);
  if (frame.length == 0) return;
  const int row0 = frame.tile * Tile::Rows, head = blockIdx.y;
  const int groups = ceil_div(frame.length, kCorePatches);
  const int64_t offset = (static_cast<int64_t>(head) * packed.groups + frame.group) * Tile::GroupBytes;
  const VisionSource source{packed.k + offset, packed.v + offset, ceil_div(groups, Tile::TileGroups), groups};
  const int warpgroups = min(Tile::Warpgroups, ceil_div(frame.length - row0, 64));

  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::Stages; ++i) {
      barrier_init(ring.full(i), 1);
      barrier_init(ring.empty(i), warpgroups);
    }
    barrier_init(ring.queries_full(), 1);
    barrier_init_done();
  }
  // Weights of patches past the frame are 0, and their values must be no NaN that the memory held before.
  const int held = (groups - (source.tiles - 1) * Tile::TileGroups) * Tile::GroupBytes;
  for (int i = held + threadIdx.x * 16; i < Tile::TileBytes; i += Tile::Threads * 16) {
    *reinterpret_cast<uint4*>(shared + Tile::TileBytes + i) = make_uint4(0, 0, 0, 0);
  }
  fence_async_proxy();
  __syncthreads();
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  if (warpgroup >= warpgroups) return;

  if (threadIdx.x == 0) {
    const int bytes = min(Tile::Rows / kCorePatches, groups - row0 / kCorePatches) * Tile::GroupBytes;
    barrier_expect(ring.queries_full(), bytes);
    copy_bulk(ring.queries(), packed.q + offset + row0 / kCorePatches * Tile::GroupBytes, bytes, ring.queries_full());
    for (int i = 0; i < min(Tile::Stages, source.tiles); ++i) start_copy(ring, source, i);
  }
  __syncwarp();

  const float scale_log2 = p.scale * 1.44269504f;
  const uint32_t queries = ring.queries() + warpgroup * 64 / kCorePatches * Tile::GroupBytes;
  float scores[Tile::Tokens / 8][4], sums[Tile::SumTiles][4] = {}, rescale[2];
  uint32_t weights[Tile::Tokens / 16][4];
  RunningMax running;
  barrier_wait(ring.queries_full(), 0);
  barrier_wait(ring.full(0), 0);
  start_scores<Tile>(scores, queries, ring.stage(0));
  wgmma_wait<0>();
  wgmma_pin(scores);
  mask_scores(scores, frame.length - (source.tiles - 1) * Tile::Tokens, lane);
  update_softmax(scores, running, scale_log2, rescale);
  pack_weights<T>(weights, scores);

  for (int i = 0; i + 1 < source.tiles; ++i) {
    const int stage = i % Tile::Stages, next = (i + 1) % Tile::Stages;
    if (threadIdx.x == 0 && i >= 2 && i - 2 + Tile::Stages < source.tiles) {
      barrier_wait(ring.empty((i - 2) % Tile::Stages), (i - 2) / Tile::Stages & 1);
      start_copy(ring, source, i - 2 + Tile::Stages);
    }
    __syncwarp();
    barrier_wait(ring.full(next), (i + 1) / Tile::Stages & 1);
    start_scores<Tile>(scores, queries, ring.stage(next));
    start_sums<Tile>(sums, weights, ring.stage(stage) + Tile::TileBytes);
    wgmma_wait<1>();
    wgmma_pin(scores);
    update_softmax(scores, running, scale_log2, rescale);
    wgmma_wait<0>();
    wgmma_pin(sums);
    if (threadIdx.x % 128 == 0) barrier_arrive(ring.empty(stage));
    rescale_rows(sums, rescale);
    pack_weights<T>(weights, scores);
  }
  start_sums<Tile>(sums, weights, ring.stage((source.tiles - 1) % Tile::Stages) + Tile::TileBytes);
  wgmma_wait<0>();
  wgmma_pin(sums);

  const int row = row0 + warpgroup * 64 + threadIdx.x % 128 / 32 * 16;
  const int64_t row_size = static_cast<int64_t>(p.num_heads) * Tile::D;
  T* out = static_cast<T*>(p.out) + (frame.start + row) * row_size + head * Tile::D;
  write_rows(out, row_size, frame.length - row, sums, lane);
#endif
}

}  // namespace trt_eagle3
