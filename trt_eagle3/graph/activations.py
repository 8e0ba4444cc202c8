"""Store in a graph's metadata how products with quantised weights read their input."""

from __future__ import annotations

import onnx

__all__ = ["read_activations", "write_activations"]

_KEY = "trt_eagle3.activations"
_DEFAULT = "compute"


def write_activations(model: onnx.ModelProto, activations: str) -> None:
    """Set how the products of ``model`` with quantised weights read their input.

    ``activations``: a value of ``engine.activations``.
    """
    if activations != _DEFAULT:
        model.metadata_props.add(key=_KEY, value=activations)


def read_activations(model: onnx.ModelProto) -> str:
    """Return the value of ``write_activations``; ``compute`` if it was not called."""
    return next((e.value for e in model.metadata_props if e.key == _KEY), _DEFAULT)
