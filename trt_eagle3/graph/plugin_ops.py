"""The ops that the TensorRT plugin library has: those of ``ops.py``, and a matrix product.

With their ONNX schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from trt_eagle3.graph.ops import DOMAIN, OPS, Op

__all__ = ["PLUGINS", "PLUGIN_VERSION", "plugin_schemas"]

PLUGIN_VERSION = "4"  # as kPluginVersion in plugins/tensorrt/node.h

# y = x . weight^T, what a Gemm without a bias is where a plugin computes it.
#   x: T [n, K]; weight: T [N, K]; y: T [n, N]
_LINEAR = Op(
    inputs={"": ("x", "weight")},
    outputs={"": ("y",)},
    attributes={"": ()},
    lowering={"": "y = Gemm <transB = 1> (x, weight)"},
    plugin="Linear",
)

PLUGINS: Mapping[str, Op] = {**OPS, "Linear": _LINEAR}

_TYPE_VARIABLES = {"T": ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]}
_VARIABLE_OF = {
    "position_ids": "tensor(int32)",
    "pair_axis": "tensor(int32)",
    "rows": "tensor(int32)",
    "past_lengths": "tensor(int32)",
    "query_lengths": "tensor(int32)",
    "page_table": "tensor(int32)",
    "rope_positions": "tensor(int32)",
    "frame_starts": "tensor(int32)",
    "inv_freq": "tensor(float)",
    "tree_mask": "tensor(bool)",
}
_NUMBERS = {
    "epsilon": "FLOAT",
    "scale": "FLOAT",
    "plugin_version": "STRING",
    "plugin_namespace": "STRING",
}
_EXTRA_ATTRIBUTES = {
    "AddRmsNorm": ("num_outputs", "x_type", "residual_type"),
    "TreeAttention": ("prefetch_safe",),
}
_PLUGIN_ATTRIBUTES = ("plugin_version", "plugin_namespace", "compute_type")


def plugin_schemas() -> list[onnx.defs.OpSchema]:
    """Schemas of the ops as the exported nodes are, for ``onnx.checker`` (register them first)."""
    return [_schema(name) for name in PLUGINS]


def _schema(op_type: str) -> onnx.defs.OpSchema:
    """One schema for all overloads: what only some have is optional."""
    op, schema = PLUGINS[op_type], onnx.defs.OpSchema
    variables = {"x": "X", "residual": "R", "sum": "R"} if op_type == "AddRmsNorm" else {}

    def parameters(overloads: Mapping[str, tuple[str, ...]]) -> list[Any]:
        names = list(dict.fromkeys(name for group in overloads.values() for name in group))
        always = set.intersection(*(set(group) for group in overloads.values()))
        return [
            schema.FormalParameter(
                name,
                _VARIABLE_OF.get(name) or variables.get(name, "T"),
                param_option=schema.FormalParameterOption.Single
                if name in always
                else schema.FormalParameterOption.Optional,
            )
            for name in names
        ]

    own = dict.fromkeys(name for group in op.attributes.values() for name in group)
    always = set.intersection(set(own), *(set(group) for group in op.attributes.values()))
    extra = _EXTRA_ATTRIBUTES.get(op_type, ())
    attributes = [
        schema.Attribute(
            name, getattr(schema.AttrType, _NUMBERS.get(name, "INT")), required=name in always
        )
        for name in (*own, *_PLUGIN_ATTRIBUTES, *extra)
    ]
    floats = _TYPE_VARIABLES["T"]
    return schema(
        op_type,
        DOMAIN,
        1,
        inputs=parameters(op.inputs),
        outputs=parameters(op.outputs),
        type_constraints=[(name, floats, "") for name in ("T", *dict.fromkeys(variables.values()))],
        attributes=attributes,
    )
