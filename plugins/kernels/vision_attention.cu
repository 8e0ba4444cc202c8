// VisionAttention: attention of each patch over its own frame. Chooses a path and launches it.
#include "chip.cuh"
#include "vision_mma.cuh"
#include "vision_simple.cuh"
#include "vision_wgmma.cuh"

namespace trt_eagle3 {
namespace {

bool has_tensor_core_path(const VisionAttentionParams& p) {
  const bool known = p.head_dim == 64 || p.head_dim == 72 || p.head_dim == 80 || p.head_dim == 128;
  return p.dtype != DType::kFloat32 && known && p.path != AttentionPath::kSimple;
}

int64_t plane_bytes(const VisionAttentionParams& p) {
  return static_cast<int64_t>(p.num_heads) * vision_groups(p) * group_bytes(p.head_dim);
}

PackedVision packed_in(const VisionAttentionParams& p, void* workspace) {
  char* base = static_cast<char*>(workspace);
  const int64_t plane = plane_bytes(p);
  return {base, base + plane, base + 2 * plane, vision_groups(p)};
}

// Blocks of `rows` patches that any frame_starts of these sizes can need.
int row_tiles(const VisionAttentionParams& p, int rows) {
  return static_cast<int>(int64_t{p.num_patches} / rows + std::min(p.num_frames, p.num_patches));
}

template <typename Tile>
cudaError_t run_tile(void (*kernel)(VisionAttentionParams, PackedVision), const VisionAttentionParams& p,
                     const PackedVision& packed, cudaStream_t stream) {
  const auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
  const cudaError_t error = cudaFuncSetAttribute(kernel, limit, Tile::SharedBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(row_tiles(p, Tile::Rows), p.num_heads);
  return launch(Overlap::kYes, kernel, grid, Tile::Threads, Tile::SharedBytes, 1, stream, p, packed);
}

// Two warpgroups a block where three would leave more of the last wave of blocks idle.
template <typename T, int kD>
cudaError_t run_wgmma(const VisionAttentionParams& p, const PackedVision& packed, const Chip& chip,
                      cudaStream_t stream) {
  using Wide = VisionTile<T, kD, 3, 4>;
  using Narrow = VisionTile<T, kD, 2, 4>;
  const auto waves = [&](int rows) {
    const int64_t blocks = (p.num_patches / rows + int64_t{p.num_patches % rows != 0}) * p.num_heads;
    return (blocks + chip.sms - 1) / chip.sms * rows;
  };
  if (waves(Narrow::Rows) * 10 < waves(Wide::Rows) * 9) {
    return run_tile<Narrow>(vision_wgmma_kernel<Narrow>, p, packed, stream);
  }
  return run_tile<Wide>(vision_wgmma_kernel<Wide>, p, packed, stream);
}

template <typename T, int kD>
cudaError_t run_head_dim(const VisionAttentionParams& p, const PackedVision& packed, const Chip& chip,
                         cudaStream_t stream) {
  const bool wgmma = has_wgmma(chip) && p.path != AttentionPath::kMma;
  if (wgmma) return run_wgmma<T, kD>(p, packed, chip, stream);
  if (p.path == AttentionPath::kWgmma) return cudaErrorNotSupported;
  using Tile = VisionMmaTile<T, kD>;
  return run_tile<Tile>(vision_mma_kernel<Tile>, p, packed, stream);
}

template <typename T>
cudaError_t run_packed(const VisionAttentionParams& p, const PackedVision& packed, cudaStream_t stream) {
  Chip chip;
  cudaError_t error = Chip::current(&chip);
  if (error != cudaSuccess) return error;
  error = launch(Overlap::kYes, vision_pack_kernel<T>, dim3(packed.groups), kPackThreads, 0, 1, stream, p, packed);
  if (error != cudaSuccess) return error;
  switch (p.head_dim) {
    case 64:
      return run_head_dim<T, 64>(p, packed, chip, stream);
    case 72:
      return run_head_dim<T, 72>(p, packed, chip, stream);
    case 80:
      return run_head_dim<T, 80>(p, packed, chip, stream);
    default:
      return run_head_dim<T, 128>(p, packed, chip, stream);
  }
}

template <typename T>
cudaError_t run_simple(const VisionAttentionParams& p, cudaStream_t stream) {
  const dim3 grid(row_tiles(p, kSimpleRows), p.num_heads);
  const auto kernel = p.head_dim <= 32   ? vision_simple_kernel<T, 32>
                      : p.head_dim <= 80 ? vision_simple_kernel<T, 80>
                                         : vision_simple_kernel<T, kMaxVisionHeadDim>;
  return launch(Overlap::kYes, kernel, grid, kSimpleRows, 0, 1, stream, p);
}

}  // namespace

cudaError_t vision_attention_workspace(const VisionAttentionParams& params, size_t* bytes) {
  *bytes = has_tensor_core_path(params) ? 3 * plane_bytes(params) : 0;
  return cudaSuccess;
}

cudaError_t vision_attention(const VisionAttentionParams& params, void* workspace, size_t workspace_bytes,
                             cudaStream_t stream) {
  if (params.num_patches == 0) return cudaSuccess;
  size_t wanted = 0;
  const cudaError_t error = vision_attention_workspace(params, &wanted);
  if (error != cudaSuccess) return error;
  if (wanted > workspace_bytes) return cudaErrorInvalidValue;
  if (wanted == 0) {
    if (params.path == AttentionPath::kMma || params.path == AttentionPath::kWgmma) return cudaErrorNotSupported;
    return with_dtype(params.dtype, [&](auto t) { return run_simple<decltype(t)>(params, stream); });
  }
  const PackedVision packed = packed_in(params, workspace);
  if (params.dtype == DType::kFloat16) return run_packed<__half>(params, packed, stream);
  return run_packed<__nv_bfloat16>(params, packed, stream);
}

}  // namespace trt_eagle3
