// Stands in for the kernels, so that the C library's checks are tested where
// only a C++ compiler and CUDA's headers are.
#include "params.h"

namespace trt_eagle3 {

// Weak: tests/engine/trt/planning_stub.cpp has one that asks for the chip.
__attribute__((weak)) cudaError_t tree_attention_workspace(const TreeAttentionParams&, size_t* bytes) {
  *bytes = 0;
  return cudaSuccess;
}
cudaError_t tree_attention(const TreeAttentionParams&, void*, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t qk_norm_mrope(const QKNormMRopeParams&, cudaStream_t) { return cudaSuccess; }
cudaError_t add_rms_norm(const AddRmsNormParams&, cudaStream_t) { return cudaSuccess; }
cudaError_t add_layer_norm(const AddLayerNormParams&, cudaStream_t) { return cudaSuccess; }
cudaError_t silu_mul(const SiluMulParams&, cudaStream_t) { return cudaSuccess; }
cudaError_t linear(const LinearParams& p, cudaStream_t) {
  return p.dtype == DType::kFloat32 || p.num_rows > kMaxLinearRows ? cudaErrorNotSupported : cudaSuccess;
}
// As vision_attention.cu has it: callers must ask with the sizes, heads and type that they launch with.
cudaError_t vision_attention_workspace(const VisionAttentionParams& p, size_t* bytes) {
  const bool known = p.head_dim == 64 || p.head_dim == 72 || p.head_dim == 80 || p.head_dim == 128;
  const bool packs = p.dtype != DType::kFloat32 && known;
  const int64_t core_matrices = ((p.num_patches + 7) / 8 + p.num_frames) * int64_t{p.head_dim / 8 + 1};
  *bytes = packs ? 3 * p.num_heads * core_matrices * 128 : 0;
  return cudaSuccess;
}
cudaError_t vision_attention(const VisionAttentionParams&, void*, size_t, cudaStream_t) { return cudaSuccess; }
// As gated_delta.cu has it: grows with the rows, of 16-bit types alone.
cudaError_t gated_delta_workspace(const GatedDeltaParams& p, size_t* bytes) {
  const int64_t rows = int64_t{p.batch} * p.num_new, heads = 2 * (p.num_k_heads + p.num_v_heads);
  *bytes = p.dtype != DType::kFloat32 && p.num_new > 16 ? rows * heads * 256 : 0;
  return cudaSuccess;
}
cudaError_t gated_delta(const GatedDeltaParams&, void*, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t commit_delta(const CommitDeltaParams&, cudaStream_t) { return cudaSuccess; }
cudaError_t commit_window(const CommitWindowParams&, cudaStream_t) { return cudaSuccess; }
cudaError_t linear_fp8(const LinearFp8Params&, cudaStream_t) { return cudaSuccess; }
cudaError_t linear_int8(const LinearInt8Params&, cudaStream_t) { return cudaSuccess; }
cudaError_t linear_int4(const LinearInt4Params&, cudaStream_t) { return cudaSuccess; }
cudaError_t linear_nvfp4(const LinearNvfp4Params&, cudaStream_t) { return cudaSuccess; }
cudaError_t unpack_nvfp4(const UnpackNvfp4Params&, cudaStream_t) { return cudaSuccess; }
cudaError_t quantise_silu_mul(const QuantiseSiluMulParams&, cudaStream_t) { return cudaSuccess; }
cudaError_t quantise_add_rms_norm(const QuantiseAddRmsNormParams&, cudaStream_t) { return cudaSuccess; }
cudaError_t linear_w8a8(const LinearW8A8Params&, cudaStream_t) { return cudaSuccess; }
cudaError_t unpack_fp8(const UnpackFp8Params&, cudaStream_t) { return cudaSuccess; }
cudaError_t unpack_int8(const UnpackInt8Params&, cudaStream_t) { return cudaSuccess; }
cudaError_t unpack_int4(const UnpackInt4Params&, cudaStream_t) { return cudaSuccess; }
cudaError_t quantise_rows(const QuantiseRowsParams&, cudaStream_t) { return cudaSuccess; }
cudaError_t kv_move(const KVMoveParams&, cudaStream_t) { return cudaSuccess; }
cudaError_t fused_moe_workspace(const FusedMoeParams&, size_t* bytes) { return *bytes = 0, cudaSuccess; }
cudaError_t fused_moe(const FusedMoeParams&, void*, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t fused_moe_fp8_workspace(const FusedMoeFp8Params&, size_t* bytes) { return *bytes = 0, cudaSuccess; }
cudaError_t fused_moe_fp8(const FusedMoeFp8Params&, void*, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t fused_moe_int4_workspace(const FusedMoeInt4Params&, size_t* bytes) { return *bytes = 0, cudaSuccess; }
cudaError_t fused_moe_int4(const FusedMoeInt4Params&, void*, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t route_rows(const RouteRowsParams&, cudaStream_t) { return cudaSuccess; }
cudaError_t gather_rows(const GatherRowsParams&, cudaStream_t) { return cudaSuccess; }
cudaError_t combine_rows(const CombineRowsParams&, cudaStream_t) { return cudaSuccess; }

}  // namespace trt_eagle3
