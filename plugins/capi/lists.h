// Made by `python -m trt_eagle3.engine.capi.header` from the descriptions in
// trt_eagle3/graph/ops and engine/capi/kernels.py: change those.
#pragma once

// X(name, Params, number of tensors), in the second list of kernels with a workspace.
#define TE3_KERNELS(X) \
  X(add_rms_norm, AddRmsNormParams, 5) \
  X(qk_norm_mrope, QKNormMRopeParams, 9) \
  X(silu_mul, SiluMulParams, 2) \
  X(linear, LinearParams, 3) \
  X(add_layer_norm, AddLayerNormParams, 6) \
  X(kv_move, KVMoveParams, 4) \
  X(linear_fp8, LinearFp8Params, 4) \
  X(linear_int8, LinearInt8Params, 4) \
  X(linear_int4, LinearInt4Params, 5) \
  X(linear_nvfp4, LinearNvfp4Params, 5) \
  X(linear_w8a8, LinearW8A8Params, 5) \
  X(unpack_fp8, UnpackFp8Params, 3) \
  X(unpack_int8, UnpackInt8Params, 3) \
  X(unpack_int4, UnpackInt4Params, 4) \
  X(unpack_nvfp4, UnpackNvfp4Params, 4) \
  X(route_rows, RouteRowsParams, 5) \
  X(gather_rows, GatherRowsParams, 7) \
  X(combine_rows, CombineRowsParams, 4) \
  X(quantise_rows, QuantiseRowsParams, 3) \
  X(quantise_silu_mul, QuantiseSiluMulParams, 3) \
  X(quantise_add_rms_norm, QuantiseAddRmsNormParams, 6) \
  X(commit_delta, CommitDeltaParams, 4) \
  X(commit_window, CommitWindowParams, 4)

#define TE3_KERNELS_WITH_WORKSPACE(X) \
  X(tree_attention, TreeAttentionParams, 11) \
  X(vision_attention, VisionAttentionParams, 6) \
  X(gated_delta, GatedDeltaParams, 15) \
  X(fused_moe, FusedMoeParams, 5) \
  X(fused_moe_fp8, FusedMoeFp8Params, 7) \
  X(fused_moe_int4, FusedMoeInt4Params, 9)

// X(name): the ops that TensorRT has plugins for.
#define TE3_PLUGINS(X) \
  X(add_rms_norm) \
  X(qk_norm_mrope) \
  X(tree_attention) \
  X(silu_mul) \
  X(pick_rows) \
  X(vision_attention) \
  X(gated_delta) \
  X(fused_moe) \
  X(linear) \
  X(linear_fp8) \
  X(linear_int8) \
  X(linear_int4) \
  X(fused_moe_fp8) \
  X(fused_moe_int4)

#define TE3_PLUGIN_VERSION "9"
