// From C arguments to launch parameters, checked. What a check finds wrong is in it; the parameters then mean nothing.
#pragma once

#include "../kernels/params.h"
#include "check.h"

namespace trt_eagle3 {

TreeAttentionParams tree_params(const te3_tree_attention_args& args, Check* check);
QKNormMRopeParams rope_params(const te3_qk_norm_mrope_args& args, Check* check);
AddRmsNormParams norm_params(const te3_add_rms_norm_args& args, Check* check);
AddLayerNormParams layer_norm_params(const te3_add_layer_norm_args& args, Check* check);
SiluMulParams silu_params(const te3_silu_mul_args& args, Check* check);
LinearParams linear_params(const te3_linear_args& args, Check* check);
VisionAttentionParams vision_params(const te3_vision_attention_args& args, Check* check);
KVMoveParams move_params(const te3_kv_move_args& args, Check* check);

}  // namespace trt_eagle3
