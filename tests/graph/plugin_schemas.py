"""The ONNX schemas of the plugins' nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import onnx

from trt_eagle3.graph.ops import DOMAIN, EVERY_OP, Op

__all__ = ["plugin_schemas"]

_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
_STATE_TYPES = [*_FLOATS, "tensor(int32)"]
_FIXED_TYPES = {"int32": "tensor(int32)", "float32": "tensor(float)", "bool": "tensor(bool)"}
_PLUGIN_ATTRIBUTES = {"plugin_version": "STRING", "plugin_namespace": "STRING"}


@contextmanager
def plugin_schemas() -> Iterator[None]:
    """Register schemas of the exported nodes, for ``onnx.checker``."""
    made = [_schema(op) for op in EVERY_OP.values()]
    for schema in made:
        onnx.defs.register_schema(schema)
    try:
        yield
    finally:
        for schema in made:
            onnx.defs.deregister_schema(schema.name, schema.since_version, schema.domain)


def _schema(op: Op) -> onnx.defs.OpSchema:
    """Build one schema for all overloads. Parameters that only some have are optional."""
    variables = ("T", *dict.fromkeys(t for t in op.types.values() if t not in _FIXED_TYPES))
    return onnx.defs.OpSchema(
        op.plugin,
        DOMAIN,
        1,
        inputs=_parameters(op, op.inputs),
        outputs=_parameters(op, op.outputs),
        type_constraints=[(n, _STATE_TYPES if n == "C" else _FLOATS, "") for n in variables],
        attributes=_attributes(op),
    )


def _parameters(op: Op, overloads: Mapping[str, tuple[str, ...]]) -> list[Any]:
    option = onnx.defs.OpSchema.FormalParameterOption
    names, always = _names(overloads)
    types = {name: op.types.get(name, "T") for name in names}
    return [
        onnx.defs.OpSchema.FormalParameter(
            name,
            _FIXED_TYPES.get(dtype, dtype),
            param_option=option.Single if name in always else option.Optional,
        )
        for name, dtype in types.items()
    ]


def _attributes(op: Op) -> list[onnx.defs.OpSchema.Attribute]:
    names, always = _names(op.attributes)
    types = {name: "FLOAT" if name in op.float_attributes else "INT" for name in names}
    types |= _PLUGIN_ATTRIBUTES | dict.fromkeys(("compute_type", *op.plugin_attributes), "INT")
    return [
        onnx.defs.OpSchema.Attribute(
            name, getattr(onnx.defs.OpSchema.AttrType, dtype), required=name in always
        )
        for name, dtype in types.items()
    ]


def _names(overloads: Mapping[str, tuple[str, ...]]) -> tuple[list[str], set[str]]:
    """Return all names of all overloads, in order, and the names that every overload has."""
    names = list(dict.fromkeys(name for group in overloads.values() for name in group))
    return names, set.intersection(*(set(group) for group in overloads.values()))
