"""Our op set: one file per op, and the registry of all of them.

A file declares an op's schema, its reference lowerings, its torch function, its CUDA kernel's
arguments and its TensorRT plugin (see ``op.py``). The lowerings are for opset 24, which other ONNX
runtimes can run, and for opset 17.

Shapes: B rows, S new tokens per row, N = B * S, M masked tail, P pages per row, Hq / Hkv heads, D
head_dim, H hidden; of the vision tower n patches, F frames, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import onnx

from trt_eagle3.graph.ops.add_rms_norm import ADD_RMS_NORM
from trt_eagle3.graph.ops.all_gather import ALL_GATHER
from trt_eagle3.graph.ops.all_reduce import ALL_REDUCE
from trt_eagle3.graph.ops.fused_moe import FUSED_MOE
from trt_eagle3.graph.ops.fused_moe_fp8 import FUSED_MOE_FP8
from trt_eagle3.graph.ops.fused_moe_int4 import FUSED_MOE_INT4
from trt_eagle3.graph.ops.gated_delta import GATED_DELTA
from trt_eagle3.graph.ops.linear import LINEAR
from trt_eagle3.graph.ops.linear_fp8 import LINEAR_FP8
from trt_eagle3.graph.ops.linear_int4 import LINEAR_INT4
from trt_eagle3.graph.ops.linear_int8 import LINEAR_INT8
from trt_eagle3.graph.ops.op import DOMAIN, OPSET, OPSET_17, Op
from trt_eagle3.graph.ops.pick_rows import PICK_ROWS
from trt_eagle3.graph.ops.qk_norm_mrope import QK_NORM_MROPE
from trt_eagle3.graph.ops.silu_mul import SILU_MUL
from trt_eagle3.graph.ops.tree_attention import TREE_ATTENTION
from trt_eagle3.graph.ops.vision_attention import VISION_ATTENTION

__all__ = [
    "DOMAIN",
    "EVERY_OP",
    "OPS",
    "OPSET",
    "OPSET_17",
    "Op",
    "reference_function",
]

OPS: Mapping[str, Op] = {
    "AddRmsNorm": ADD_RMS_NORM,
    "QKNormMRope": QK_NORM_MROPE,
    "TreeAttention": TREE_ATTENTION,
    "SiluMul": SILU_MUL,
    "PickRows": PICK_ROWS,
    "VisionAttention": VISION_ATTENTION,
    "GatedDelta": GATED_DELTA,
    "FusedMoe": FUSED_MOE,
}
"""The ops of our graphs."""

EVERY_OP: Mapping[str, Op] = {
    **OPS,
    "Linear": LINEAR,
    "LinearFp8": LINEAR_FP8,
    "LinearInt8": LINEAR_INT8,
    "LinearInt4": LINEAR_INT4,
    "FusedMoeFp8": FUSED_MOE_FP8,
    "FusedMoeInt4": FUSED_MOE_INT4,
    "AllReduce": ALL_REDUCE,
    "AllGather": ALL_GATHER,
}
"""The ops of our graphs, products that a backend substitutes, and exchanges between ranks."""

_WITHOUT_PLUGIN = ("AllReduce", "AllGather")
PLUGINS: Mapping[str, Op] = {n: op for n, op in EVERY_OP.items() if n not in _WITHOUT_PLUGIN}
"""The ops in the TensorRT plugin library."""


@cache
def reference_function(op_type: str, overload: str) -> onnx.FunctionProto:
    """Return the reference lowering of one overload as an ONNX function."""
    return OPS[op_type].function(overload)
