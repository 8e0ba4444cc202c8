"""Checks of quantised weights: as the engine dequantises them, and as the build made them.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from torch import Tensor

from trt_eagle3.checkpoint.experts import matrices
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.builder.weight_quantiser import made_location, read_channel_scales
from trt_eagle3.engine.bundle.check import GRAPHS
from trt_eagle3.engine.runtime.weights import materialise
from trt_eagle3.graph.weights import WeightExpr, WeightPart, external_weights
from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.metrics import Compared, RowErrors, row_errors
from trt_eagle3.parity.reference.dequantise import read_values

__all__ = ["check_made", "check_values", "lacks_made", "lacks_quantised"]

_INSIDE = "engines of this backend do not expose their weights"
_FLOAT32 = dtype_named("float32")


def lacks_quantised(e: Evidence) -> str:
    """Return why the bundle has no quantised weight; empty if it has some."""
    found = any(_quantised(e)) or any(_quantised_parts(e))
    return "" if found else "no weight is quantised"


def lacks_made(e: Evidence) -> str:
    """Return why the bundle has no weight that the build quantised; empty if it has some."""
    return "" if e.engine.record.config.engine.weights else "the build quantised no weight"


def check_values(e: Evidence, m: Measurements) -> None:
    """Compare every quantised weight of the bundle's graphs with its format's definition.

    The engine's code dequantises the weight.
    """
    engine = e.engine
    root = engine.record.weights_root(engine.path)
    parts = list(_quantised_parts(e))
    if not parts:
        m.skip(_INSIDE)
        return
    by_name = {ref.name: (name, ref) for name, ref in _quantised(e)}
    unknown = [part.name for _, part in parts if part.name not in by_name]
    place = unknown[0] if unknown else "names of quantised weights"
    m.add(len(unknown), "", place, compared=len(parts))
    # rows of one stored tensor may be many parts; the tensor is compared once
    stored = {(part.name, part.location, part.offset): (expr, part) for expr, part in parts}
    for expr, part in stored.values():
        if part.name not in by_name:
            continue
        name, ref = by_name[part.name]
        whole = WeightPart(
            part.name,
            part.location,
            part.offset,
            part.num_bytes,
            part.dtype,
            part.shape,
            quantised=part.quantised,
        )
        found = materialise(WeightExpr((whole,), _FLOAT32, expr.format), root, _FLOAT32)
        m.add_exact(Compared("", name, found, read_values(ref)))


def _quantised(e: Evidence) -> Iterator[tuple[str, TensorRef]]:
    for name, ref in e.checkpoint.tensors.items():
        yield from ((name, part) for part in matrices([ref]) if isinstance(part, QuantisedRef))


def _quantised_parts(e: Evidence) -> Iterator[tuple[WeightExpr, WeightPart]]:
    """Yield the quantised parts of every graph that has its weights in separate files."""
    for graph in GRAPHS:
        file = e.engine.path / graph / "model.onnx"
        if not file.exists():
            continue
        for expr in external_weights(onnx.load(file, load_external_data=False)).values():
            yield from ((expr, part) for part in expr.parts if part.quantised)


def check_made(e: Evidence, m: Measurements) -> None:
    """Compare weights that the build quantised with the checkpoint's; all others must be equal.

    The quantised weights are dequantised by the definition of their format. Calibration scales
    apply both to the weight that makes an input and to the weight that multiplies it.
    """
    weights = e.engine.record.config.engine.weights
    if e.original is None or weights is None:
        m.skip("the checkpoint that the build quantised was not read")
        return
    scales = read_channel_scales(e.original, e.engine.path / made_location(weights))
    for name, ref in e.checkpoint.tensors.items():
        dense = scales.scaled(name, read_values(e.original.tensors[name]))
        found = read_values(ref)
        errors = row_errors(_rows(found), _rows(dense))
        m.add_rows(RowErrors("", name, errors))


def _rows(values: Tensor) -> Tensor:
    return values.float().reshape(len(values), -1)
