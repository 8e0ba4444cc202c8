// Chooses a configuration and a number of splits for TreeAttention from the shapes, and launches it.
#pragma once

#include <algorithm>

#include "chip.cuh"
#include "prompt_launch.cuh"
#include "tree_attention.cuh"

namespace trt_eagle3 {

// Configurations per head_dim. Small: up to 16 rows, a warp per tile. Wide: 64 rows by mma.sync. With two stages both
// fit the 99 KiB of SM89. Hopper64, Hopper128: 64 and 128 rows by wgmma. HopperSmall and Hopper64 have eight warps to
// keep a multiprocessor's memory busy, in about what kSharedCarveout gives it.
template <typename T, int kD>
struct TreeTiles {
  using Small = TreeTile<T, kD, 1, 4, 16, kD == 64 ? 4 : kD == 96 ? 3 : 2, Math::kMma>;
  using Wide = TreeTile<T, kD, 4, 1, 64, 2, Math::kMma>;
  using HopperSmall = TreeTile<T, kD, 1, 8, 16, kD == 64 ? 4 : 2, Math::kMma>;
  using Hopper64 = TreeTile<T, kD, 4, 2, 64, kD == 64 ? 4 : 2, Math::kWgmma>;
  using Hopper128 = TreeTile<T, kD, 8, 1, 128, 2, Math::kWgmma>;
};
template <typename T>
struct TreeTiles<T, 256> {
  using Small = TreeTile<T, 256, 1, 2, 16, 2, Math::kMma>;
  using Wide = TreeTile<T, 256, 4, 1, 32, 2, Math::kMma>;
  using HopperSmall = TreeTile<T, 256, 1, 4, 16, 2, Math::kMma>;
  using Hopper64 = TreeTile<T, 256, 4, 1, 64, 2, Math::kWgmma>;
  using Hopper128 = TreeTile<T, 256, 8, 1, 64, 2, Math::kWgmma>;
};

// Of an FP8 cache. Tiles of 16 rows have twice the slots: as many bytes, half the work around them. Hopper64 has a
// third group, since widening takes turns with products (one H200, 16 sequences of 16,384 tokens, 8 new ones each: 298
// -> 246 us a launch; 207 since products are of float16).
template <typename T, int kD>
struct Fp8Tiles {
  using Small = TreeTile<T, kD, 1, 4, 32, kD == 64 ? 4 : 2, Math::kMma, true>;
  using Wide = TreeTile<T, kD, 4, 1, 64, 2, Math::kMma, true>;
  using HopperSmall = TreeTile<T, kD, 1, 8, 32, kD == 64 ? 4 : 2, Math::kMma, true>;
  using Hopper64 = TreeTile<T, kD, 4, 3, 64, 2, Math::kWgmma, true>;
  using Hopper128 = TreeTile<T, kD, 8, 1, 128, 2, Math::kWgmma, true>;
  using Crowd = TreeTile<T, kD, 1, 6, 32, 2, Math::kMma, true>;
  using Prompt = PromptTile<T, kD, 3, true, true>;
};

// Of many sequences: two blocks of six warps on a multiprocessor, for which it gives all its memory. While one begins,
// looking up pages and waiting for its first rows, the other's loads are on their way. One H200, 1,024 tokens of each
// of 32 / 64 / 128 sequences, us a launch: 38.6 / 75.7 / 146.2 by HopperSmall, 34.1 / 67.3 / 131.9 so.
template <typename T>
using CrowdTile = TreeTile<T, 128, 1, 6, 16, 2, Math::kMma>;
constexpr int kCrowdCarveout = 100;

// A block's shared memory: the configuration's, and the packed mask of the tokens that its rows can touch.
template <typename Tile>
int shared_bytes(const TreeAttentionParams& p) {
  if (p.mask == MaskKind::kCausal) return Tile::SharedBytes;
  const int group = p.num_heads / p.num_kv_heads;
  const int64_t tokens = std::min(p.num_new, (Tile::Rows + group - 2) / group + 1);
  return static_cast<int>(std::min<int64_t>(INT32_MAX, Tile::SharedBytes + tokens * ceil_div(p.tail, 32) * 4));
}

struct TreePlan {
  int row_tiles, splits;
  size_t workspace_bytes;
};

constexpr int kMaxSplits = 16;

// As many splits as keep every multiprocessor busy in one wave.
template <typename Tile>
TreePlan plan_tree(const TreeAttentionParams& p, const Chip& chip) {
  TreePlan plan;
  plan.row_tiles = ceil_div(p.num_new * (p.num_heads / p.num_kv_heads), Tile::Rows);
  const int64_t slots = static_cast<int64_t>(p.pages_per_row) * p.page_size;
  const int64_t tiles = std::max<int64_t>(1, (slots + Tile::Tokens - 1) / Tile::Tokens / Tile::Groups);
  const int64_t units = std::max<int64_t>(1, static_cast<int64_t>(p.batch) * p.num_kv_heads * plan.row_tiles);
  const int room = chip.major >= 9 ? chip.shared_bytes * kSharedCarveout / 100 : chip.shared_bytes;
  const int blocks_per_sm = shared_bytes<Tile>(p) * 2 <= room ? 2 : 1;
  const int64_t wanted = p.num_splits > 0 ? p.num_splits : chip.sms * blocks_per_sm / units;
  plan.splits = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>({wanted, tiles, kMaxSplits})));
  plan.workspace_bytes = 0;
  if (plan.splits > 1) plan.workspace_bytes = sizeof(float) * kWorkspacePart<Tile> * units * plan.splits;
  return plan;
}

// grid (N): writes the new tokens to the cache, for launches whose blocks then read everything from there.
template <typename T, bool kFp8, int kThreads>
__global__ void __launch_bounds__(kThreads) tree_write_kernel(const TreeAttentionParams p, int row_packs) {
  wait_for_previous();
  const int sequence = blockIdx.x / p.num_new;
  const int token = blockIdx.x - sequence * p.num_new;
  const int position = p.past_lengths[sequence] + p.tail - p.num_new + token;
  if (token >= p.query_lengths[sequence] || position >= p.pages_per_row * p.page_size) return;
  const int64_t target = static_cast<int64_t>(cache_slot(p, sequence, position)) * row_packs;
  const int64_t source = static_cast<int64_t>(blockIdx.x) * row_packs;
  for (int i = threadIdx.x; i < row_packs; i += kThreads) {
    const int kv_head = kFp8 ? i / (p.head_dim / 8) : 0;
    store_eight<T, kFp8>(p.k_cache, target + i, static_cast<const uint4*>(p.k)[source + i],
                         kv_scale<kFp8>(p, 0, kv_head));
    store_eight<T, kFp8>(p.v_cache, target + i, static_cast<const uint4*>(p.v)[source + i],
                         kv_scale<kFp8>(p, 1, kv_head));
  }
}

template <typename T, bool kFp8>
cudaError_t tree_write(const TreeAttentionParams& p, cudaStream_t stream) {
  const auto write = tree_write_kernel<T, kFp8, 128>;
  const int row_packs = p.num_kv_heads * p.head_dim / 8;
  return launch(Overlap::kYes, write, p.batch * p.num_new, 128, 0, 1, stream, p, row_packs);
}

// From this many new tokens on, a launch of its own writes them first, and tiles of new tokens load like the rest.
constexpr int kWriteFirst = 256;

template <typename Tile>
cudaError_t run_tree(TreeAttentionParams p, const Chip& chip, const TreeRequest& request,
                     int carveout = kSharedCarveout) {
  int bytes = shared_bytes<Tile>(p);
  if (bytes > chip.shared_bytes) return cudaErrorNotSupported;
  const TreePlan plan = plan_tree<Tile>(p, chip);
  if (request.bytes != nullptr) {
    *request.bytes = plan.workspace_bytes;
    return cudaSuccess;
  }
  if (plan.workspace_bytes > request.workspace_bytes) return cudaErrorInvalidValue;
  const dim3 grid(plan.splits, p.batch * p.num_kv_heads, plan.row_tiles);
  if (p.num_new >= kWriteFirst) {
    const cudaError_t error = tree_write<typename Tile::T, Tile::Fp8>(p, request.stream);
    if (error != cudaSuccess) return error;
    p.written = 1;
    p.prefetch_safe = 0;  // that launch writes the cache
  }
  // One block to a multiprocessor where they all find room so: those that come up early would gather, two by two, on
  // the first that are free (measured: 119 -> 117 us for a layer of a decode step).
  if (static_cast<int64_t>(grid.x) * grid.y * grid.z <= chip.sms) bytes = std::max(bytes, chip.shared_bytes / 2 + 2048);
  float* workspace = static_cast<float*>(request.workspace);
  const auto kernel = tree_attention_kernel<Tile>;
  // The most that there is, always: another thread may launch with more between this and the launch.
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, chip.shared_bytes);
  if (error != cudaSuccess) return error;
  // Measured: a block whose groups each have a ring is slower when it comes up early with nothing to do.
  const Overlap overlap = Tile::Groups > 1 && p.prefetch_safe == 0 ? Overlap::kNo : Overlap::kYes;
  error = launch_with_carveout(carveout, overlap, kernel, grid, Tile::Threads, bytes, 1, request.stream, p, workspace);
  if (error != cudaSuccess || plan.splits == 1) return error;
  const dim3 combine_grid(ceil_div(Tile::Rows * Tile::D / 4, 256), grid.y, grid.z);
  return launch(Overlap::kYes, tree_combine_kernel<Tile>, combine_grid, 256, 0, 1, request.stream, p, workspace,
                plan.splits);
}

template <typename Tiles>
cudaError_t run_tree_fp8(const TreeAttentionParams& p, const TreeRequest& request) {
  Chip chip;
  if (const cudaError_t error = Chip::current(&chip); error != cudaSuccess) return error;
  using Prompt = typename Tiles::Prompt;
  if constexpr (Prompt::D == 128) {
    const bool fits = WidenedCache::bytes(p) <= kMaxWidenedBytes;
    if (has_wgmma(chip) && fits && prompt_pays<Prompt>(p, chip)) return run_prompt<Prompt>(p, chip, request);
  }
  if (p.path == AttentionPath::kPrompt) return cudaErrorNotSupported;
  const int rows = p.num_new * (p.num_heads / p.num_kv_heads);
  if (p.path != AttentionPath::kMma && has_wgmma(chip) && (rows > 16 || p.path == AttentionPath::kWgmma)) {
    if (rows <= 64) return run_tree<typename Tiles::Hopper64>(p, chip, request);
    return run_tree<typename Tiles::Hopper128>(p, chip, request);
  }
  if (p.path == AttentionPath::kWgmma) return cudaErrorNotSupported;
  if (rows > 16) return run_tree<typename Tiles::Wide>(p, chip, request);
  if (chip.major != 9) return run_tree<typename Tiles::Small>(p, chip, request);
  if (p.batch * p.num_kv_heads * 10 >= chip.sms * 18) {
    return run_tree<typename Tiles::Crowd>(p, chip, request, kCrowdCarveout);
  }
  return run_tree<typename Tiles::HopperSmall>(p, chip, request);
}

template <typename T, int kD>
cudaError_t run_tree_sized(const TreeAttentionParams& p, const TreeRequest& request) {
  using Tiles = TreeTiles<T, kD>;
  Chip chip;
  if (const cudaError_t error = Chip::current(&chip); error != cudaSuccess) return error;
  const int rows = p.num_new * (p.num_heads / p.num_kv_heads);
  if constexpr (kD == 128) {
    using Prompt = PromptTile<T, kD, 3>;
    if (has_wgmma(chip) && prompt_pays<Prompt>(p, chip)) return run_prompt<Prompt>(p, chip, request);
  }
  if (p.path == AttentionPath::kPrompt) return cudaErrorNotSupported;
  if constexpr (kD % 64 == 0) {
    if (p.path != AttentionPath::kMma && has_wgmma(chip) && (rows > 16 || p.path == AttentionPath::kWgmma)) {
      if (rows <= 64) return run_tree<typename Tiles::Hopper64>(p, chip, request);
      return run_tree<typename Tiles::Hopper128>(p, chip, request);
    }
  }
  if (p.path == AttentionPath::kWgmma) return cudaErrorNotSupported;
  if constexpr (kD == 128) {
    // Work for two blocks on every multiprocessor.
    if (rows <= 16 && chip.major == 9 && p.batch * p.num_kv_heads * 10 >= chip.sms * 18) {
      return run_tree<CrowdTile<T>>(p, chip, request, kCrowdCarveout);
    }
  }
  if (rows <= 16 && chip.major == 9) return run_tree<typename Tiles::HopperSmall>(p, chip, request);
  if (rows <= 16) return run_tree<typename Tiles::Small>(p, chip, request);
  return run_tree<typename Tiles::Wide>(p, chip, request);
}

// One translation unit per head_dim instantiates this.
template <int kD>
cudaError_t run_tree_head_dim(const TreeAttentionParams& p, const TreeRequest& request);

#define TRT_EAGLE3_INSTANTIATE_TREE(kD)                                                         \
  template <>                                                                                   \
  cudaError_t run_tree_head_dim<kD>(const TreeAttentionParams& p, const TreeRequest& request) { \
    if (p.dtype == DType::kFloat16) return run_tree_sized<__half, kD>(p, request);              \
    return run_tree_sized<__nv_bfloat16, kD>(p, request);                                       \
  }

// Those of FP8 caches.
template <int kD>
cudaError_t run_tree_fp8_head_dim(const TreeAttentionParams& p, const TreeRequest& request);

#define TRT_EAGLE3_INSTANTIATE_TREE_FP8(kD)                                                         \
  template <>                                                                                       \
  cudaError_t run_tree_fp8_head_dim<kD>(const TreeAttentionParams& p, const TreeRequest& request) { \
    if (p.dtype == DType::kFloat16) return run_tree_fp8<Fp8Tiles<__half, kD>>(p, request);          \
    return run_tree_fp8<Fp8Tiles<__nv_bfloat16, kD>>(p, request);                                   \
  }

}  // namespace trt_eagle3
