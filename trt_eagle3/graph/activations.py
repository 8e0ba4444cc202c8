"""What a graph's products with quantised weights read their input as: an entry of its metadata."""

from __future__ import annotations

import onnx

__all__ = ["read_activations", "write_activations"]

_KEY = "trt_eagle3.activations"
_DEFAULT = "compute"


def write_activations(model: onnx.ModelProto, activations: str) -> None:
    """Let the products of ``model`` with quantised weights read their input as ``activations``, a
    value of ``engine.activations``.
    """
    if activations != _DEFAULT:
        model.metadata_props.add(key=_KEY, value=activations)


def read_activations(model: onnx.ModelProto) -> str:
    """What ``write_activations`` wrote; ``compute`` where it was not called."""
    return next((e.value for e in model.metadata_props if e.key == _KEY), _DEFAULT)
