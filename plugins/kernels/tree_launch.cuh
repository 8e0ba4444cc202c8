// Chooses a configuration and a number of splits for TreeAttention from the shapes, and launches it.
#pragma once

#include <algorithm>

#include "tree_combine.cuh"

namespace trt_eagle3 {

// Configurations per head_dim. Small: up to 16 rows, warps share the slots. Wide: 64 rows by mma.sync, on any chip.
// Hopper64 / Hopper128: 64 / 128 rows by wgmma. Small and Wide fit the 99 KiB of SM89.
template <typename T, int kD>
struct TreeTiles {
  using Small = TreeTile<T, kD, 1, 4, 64, 3, Math::kMma>;
  using Wide = TreeTile<T, kD, 4, 1, 64, 3, Math::kMma>;
  using Hopper64 = TreeTile<T, kD, 4, 1, 64, 3, Math::kWgmma>;
  using Hopper128 = TreeTile<T, kD, 8, 1, 128, 2, Math::kWgmma>;
};
template <typename T>
struct TreeTiles<T, 256> {
  using Small = TreeTile<T, 256, 1, 2, 32, 3, Math::kMma>;
  using Wide = TreeTile<T, 256, 4, 1, 32, 3, Math::kMma>;
  using Hopper64 = TreeTile<T, 256, 4, 1, 64, 2, Math::kWgmma>;
  using Hopper128 = TreeTile<T, 256, 8, 1, 64, 2, Math::kWgmma>;
};

struct Chip {
  int major = 0, sms = 0;

  static cudaError_t current(Chip* chip) {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&chip->major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&chip->sms, cudaDevAttrMultiProcessorCount, device);
    return error;
  }
};

// wgmma exists where SM90a code was built, on the chips that it was built for.
inline bool has_wgmma(const Chip& chip) {
#ifdef TRT_EAGLE3_SM90A
  return chip.major == 9;
#else
  return false;
#endif
}

template <typename Tile, bool kCluster>
cudaError_t allow_shared_memory() {
  return cudaFuncSetAttribute(tree_attention_kernel<Tile, kCluster>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              Tile::SharedBytes);
}

template <typename Tile>
cudaLaunchConfig_t cluster_config(dim3 grid, cudaStream_t stream, cudaLaunchAttribute* attribute) {
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim.x = grid.x;
  attribute->val.clusterDim.y = 1;
  attribute->val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(Tile::Threads);
  config.dynamicSmemBytes = Tile::SharedBytes;
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = 1;
  return config;
}

// The largest cluster that this chip runs this configuration in; 0 before Hopper.
template <typename Tile>
int largest_cluster(const Chip& chip) {
  if (chip.major < 9) return 0;
  static const int size = [] {
    const auto kernel = tree_attention_kernel<Tile, true>;
    if (allow_shared_memory<Tile, true>() != cudaSuccess) return 0;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess) return 0;
    for (int blocks = 16; blocks > 1; blocks /= 2) {
      cudaLaunchAttribute attribute;
      const cudaLaunchConfig_t config = cluster_config<Tile>(dim3(blocks), nullptr, &attribute);
      int clusters = 0;
      if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess && clusters > 0) return blocks;
      cudaGetLastError();
    }
    return 0;
  }();
  return size;
}

struct TreePlan {
  int row_tiles, splits;
  bool cluster;
  size_t workspace_bytes;
};

// As many splits as keep every multiprocessor busy, a power of two, at most one per tile of slots.
template <typename Tile>
TreePlan plan_tree(const TreeAttentionParams& p, const Chip& chip) {
  TreePlan plan;
  const int group = p.num_heads / p.num_kv_heads;
  plan.row_tiles = ceil_div(p.num_new * group, Tile::Rows);
  const int pairs = p.batch * p.num_kv_heads;
  const int largest = p.combine == CombineKind::kWorkspace ? 0 : largest_cluster<Tile>(chip);
  constexpr int kBlocksPerSm = Tile::SharedBytes * 2 <= 226 * 1024 ? 2 : 1;
  const int64_t slots = static_cast<int64_t>(p.pages_per_row) * p.page_size;
  const int64_t tiles = (slots + Tile::Tokens - 1) / Tile::Tokens;
  const int limit = static_cast<int>(std::min<int64_t>(tiles, largest > 0 ? largest : 16));
  const int wanted = p.num_splits > 0 ? p.num_splits : chip.sms * kBlocksPerSm / std::max(1, pairs * plan.row_tiles);
  plan.splits = 1;
  while (plan.splits * 2 <= std::min(wanted, limit)) plan.splits *= 2;
  plan.cluster = plan.splits > 1 && largest > 0;
  plan.workspace_bytes = 0;
  if (plan.splits > 1 && !plan.cluster) {
    plan.workspace_bytes = sizeof(float) * kWorkspacePart<Tile> * pairs * plan.row_tiles * plan.splits;
  }
  return plan;
}

// With `bytes`, says how much workspace a launch wants; without, launches.
struct TreeRequest {
  size_t* bytes;
  void* workspace;
  size_t workspace_bytes;
  cudaStream_t stream;
};

template <typename Tile>
cudaError_t run_tree(const TreeAttentionParams& p, const Chip& chip, const TreeRequest& request) {
  const TreePlan plan = plan_tree<Tile>(p, chip);
  if (request.bytes != nullptr) {
    *request.bytes = plan.workspace_bytes;
    return cudaSuccess;
  }
  if (plan.workspace_bytes > request.workspace_bytes) return cudaErrorInvalidValue;
  const dim3 grid(plan.splits, p.batch * p.num_kv_heads, plan.row_tiles);
  if (plan.cluster) {
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config = cluster_config<Tile>(grid, request.stream, &attribute);
    return cudaLaunchKernelEx(&config, tree_attention_kernel<Tile, true>, p, static_cast<float*>(nullptr));
  }
  if (const cudaError_t error = allow_shared_memory<Tile, false>(); error != cudaSuccess) return error;
  float* workspace = static_cast<float*>(request.workspace);
  tree_attention_kernel<Tile, false><<<grid, Tile::Threads, Tile::SharedBytes, request.stream>>>(p, workspace);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess || plan.splits == 1) return error;
  const dim3 combine_grid(ceil_div(Tile::Rows * Tile::D / 4, 256), grid.y, grid.z);
  tree_combine_kernel<Tile><<<combine_grid, 256, 0, request.stream>>>(p, workspace, plan.splits);
  return cudaGetLastError();
}

template <typename T, int kD>
cudaError_t run_tree_sized(const TreeAttentionParams& p, const TreeRequest& request) {
  using Tiles = TreeTiles<T, kD>;
  Chip chip;
  if (const cudaError_t error = Chip::current(&chip); error != cudaSuccess) return error;
  const int rows = p.num_new * (p.num_heads / p.num_kv_heads);
  if constexpr (kD % 64 == 0) {
    const bool wanted = p.path == AttentionPath::kWgmma || (p.path == AttentionPath::kAuto && rows > 16);
    if (wanted && has_wgmma(chip)) {
      if (rows <= 64) return run_tree<typename Tiles::Hopper64>(p, chip, request);
      return run_tree<typename Tiles::Hopper128>(p, chip, request);
    }
  }
  if (p.path == AttentionPath::kWgmma) return cudaErrorNotSupported;
  if (rows <= 16) return run_tree<typename Tiles::Small>(p, chip, request);
  return run_tree<typename Tiles::Wide>(p, chip, request);
}

// One translation unit per head_dim instantiates this.
template <int kD>
cudaError_t run_tree_head_dim(const TreeAttentionParams& p, const TreeRequest& request);

#define TRT_EAGLE3_INSTANTIATE_TREE(kD)                                                               \
  template <>                                                                                         \
  cudaError_t run_tree_head_dim<kD>(const TreeAttentionParams& p, const TreeRequest& request) {       \
    if (p.dtype == DType::kFloat16) return run_tree_sized<__half, kD>(p, request);                    \
    return run_tree_sized<__nv_bfloat16, kD>(p, request);                                             \
  }

}  // namespace trt_eagle3
