"""Our CUDA kernels on torch tensors, through the C library that ``make plugins`` builds.

The library checks every argument on the host. A call enqueues on torch's current stream, allocates
its outputs if ``out`` is not given, and never waits, so calls can be captured in a CUDA graph. A
function here launches the ``KernelCall`` of the same-named function in ``graph/ops``. Kernels that
compute no op of a graph are in ``kernels.py``.

Shapes: B rows, S new tokens per row, N = B * S, M masked tail, P pages per row, Hq / Hkv heads, D
head_dim, H hidden. T is float32, float16 or bfloat16, the same for all floating tensors of a call.
"""

from trt_eagle3.engine.capi.kernels import MAX_KV_MOVES, add_layer_norm_call, kv_move_call
from trt_eagle3.engine.capi.launch import launched
from trt_eagle3.engine.capi.library import LIBRARY_VARIABLE, available, library_path
from trt_eagle3.engine.capi.moe import (
    DENSE_EXPERT_COLUMNS,
    MAX_EXPERTS,
    MAX_FEW_MOE_ROWS,
    MAX_TOP_K,
    combine_rows_call,
    fused_moe_call,
    fused_moe_fp8_call,
    fused_moe_int4_call,
    gather_rows_call,
    route_rows_call,
)
from trt_eagle3.engine.capi.packed import (
    GROUP_SIZES,
    MAX_PACKED_ROWS,
    PACKED_COLUMNS,
    PACKED_ROWS,
    linear_fp8_call,
    linear_int4_call,
    linear_int8_call,
    linear_nvfp4_call,
    linear_w8a8_call,
    unpack_fp8_call,
    unpack_int4_call,
    unpack_int8_call,
    unpack_nvfp4_call,
)
from trt_eagle3.engine.capi.quantise import (
    MAX_QUANTISED_NORM,
    RowCodes,
    quantise_add_rms_norm_call,
    quantise_rows_call,
    quantise_silu_mul_call,
    round_add_rms_norm_call,
    round_rows_call,
    round_silu_mul_call,
)
from trt_eagle3.engine.capi.recurrent import commit_delta_call, commit_window_call
from trt_eagle3.graph.ops.add_rms_norm import add_rms_norm_call
from trt_eagle3.graph.ops.gated_delta_kernel import gated_delta_call
from trt_eagle3.graph.ops.kernel import AttentionPath
from trt_eagle3.graph.ops.linear import MAX_LINEAR_ROWS, linear_call
from trt_eagle3.graph.ops.qk_norm_mrope import qk_norm_mrope_call
from trt_eagle3.graph.ops.silu_mul import silu_mul_call
from trt_eagle3.graph.ops.tree_attention import tree_attention_call
from trt_eagle3.graph.ops.vision_attention import vision_attention_call

__all__ = [
    "DENSE_EXPERT_COLUMNS",
    "GROUP_SIZES",
    "LIBRARY_VARIABLE",
    "MAX_EXPERTS",
    "MAX_KV_MOVES",
    "MAX_LINEAR_ROWS",
    "MAX_FEW_MOE_ROWS",
    "MAX_PACKED_ROWS",
    "MAX_QUANTISED_NORM",
    "MAX_TOP_K",
    "PACKED_COLUMNS",
    "PACKED_ROWS",
    "AttentionPath",
    "RowCodes",
    "add_layer_norm",
    "add_rms_norm",
    "available",
    "combine_rows",
    "commit_delta",
    "commit_window",
    "fused_moe",
    "fused_moe_fp8",
    "fused_moe_int4",
    "gated_delta",
    "gather_rows",
    "kv_move",
    "launched",
    "library_path",
    "linear",
    "linear_fp8",
    "linear_int4",
    "linear_int8",
    "linear_nvfp4",
    "linear_w8a8",
    "qk_norm_mrope",
    "quantise_add_rms_norm",
    "quantise_rows",
    "quantise_silu_mul",
    "round_add_rms_norm",
    "round_rows",
    "route_rows",
    "round_silu_mul",
    "silu_mul",
    "tree_attention",
    "unpack_fp8",
    "unpack_int4",
    "unpack_int8",
    "unpack_nvfp4",
    "vision_attention",
]

add_layer_norm = launched(add_layer_norm_call)
add_rms_norm = launched(add_rms_norm_call)
combine_rows = launched(combine_rows_call)
commit_delta = launched(commit_delta_call)
commit_window = launched(commit_window_call)
fused_moe = launched(fused_moe_call)
fused_moe_fp8 = launched(fused_moe_fp8_call)
fused_moe_int4 = launched(fused_moe_int4_call)
gated_delta = launched(gated_delta_call)
gather_rows = launched(gather_rows_call)
kv_move = launched(kv_move_call)
linear = launched(linear_call)
linear_fp8 = launched(linear_fp8_call)
linear_int4 = launched(linear_int4_call)
linear_int8 = launched(linear_int8_call)
linear_nvfp4 = launched(linear_nvfp4_call)
linear_w8a8 = launched(linear_w8a8_call)
qk_norm_mrope = launched(qk_norm_mrope_call)
quantise_add_rms_norm = launched(quantise_add_rms_norm_call)
quantise_rows = launched(quantise_rows_call)
quantise_silu_mul = launched(quantise_silu_mul_call)
round_add_rms_norm = launched(round_add_rms_norm_call)
round_rows = launched(round_rows_call)
route_rows = launched(route_rows_call)
round_silu_mul = launched(round_silu_mul_call)
silu_mul = launched(silu_mul_call)
tree_attention = launched(tree_attention_call)
unpack_fp8 = launched(unpack_fp8_call)
unpack_int4 = launched(unpack_int4_call)
unpack_int8 = launched(unpack_int8_call)
unpack_nvfp4 = launched(unpack_nvfp4_call)
vision_attention = launched(vision_attention_call)
