#include "fused_moe_int4.cuh"

namespace trt_eagle3 {

template <>
cudaError_t moe_int4_groups<1>(const FusedMoeInt4Params& p, const ExpertWeight& gate_up, const ExpertWeight& down,
                                void* workspace, cudaStream_t stream);
template <>
cudaError_t moe_int4_groups<2>(const FusedMoeInt4Params& p, const ExpertWeight& gate_up, const ExpertWeight& down,
                                void* workspace, cudaStream_t stream);
template <>
cudaError_t moe_int4_groups<4>(const FusedMoeInt4Params& p, const ExpertWeight& gate_up, const ExpertWeight& down,
                                void* workspace, cudaStream_t stream);

namespace {

ExpertWeight int4_experts(const FusedMoeInt4Params& p, const int32_t* data, const void* scale, const void* zero,
                          int outer, int inner) {
  const int groups = inner / p.group;
  const PackedWeight first = {reinterpret_cast<const char*>(data),
                              scale,
                              static_cast<const uint8_t*>(zero),
                              inner,
                              outer,
                              groups,
                              0,
                              p.scale_dtype == DType::kBFloat16};
  const int64_t scales = int64_t{outer} * groups;
  return {first, int64_t{outer} * inner / 2, 2 * scales, scales};
}

}  // namespace

cudaError_t fused_moe_int4_workspace(const FusedMoeInt4Params& p, size_t* bytes) { return moe_workspace(p, bytes); }

cudaError_t fused_moe_int4(const FusedMoeInt4Params& p, void* workspace, size_t, cudaStream_t stream) {
  const ExpertWeight gate_up =
      int4_experts(p, p.gate_up, p.gate_up_scale, p.gate_up_zero_point, 2 * p.width, p.hidden);
  const ExpertWeight down = int4_experts(p, p.down, p.down_scale, p.down_zero_point, p.hidden, p.width);
  if (p.group == 128) return moe_int4_groups<1>(p, gate_up, down, workspace, stream);
  if (p.group == 64) return moe_int4_groups<2>(p, gate_up, down, workspace, stream);
  return moe_int4_groups<4>(p, gate_up, down, workspace, stream);
}

}  // namespace trt_eagle3
