"""What a graph's products with integer weights read their input as: an entry of its metadata."""

from __future__ import annotations

import onnx

__all__ = ["read_int8_activations", "write_int8_activations"]

_KEY = "trt_eagle3.activations"


def write_int8_activations(model: onnx.ModelProto) -> None:
    """Let the products of ``model`` with integer weights round their input to int8."""
    model.metadata_props.add(key=_KEY, value="int8")


def read_int8_activations(model: onnx.ModelProto) -> bool:
    """Whether ``write_int8_activations`` was called for ``model``."""
    return any(entry.key == _KEY and entry.value == "int8" for entry in model.metadata_props)
