"""FP8: e4m3 numbers times a scale of tensor, channel or block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trt_eagle3.dtype import dtype_named
from trt_eagle3.graph.formats.format import Stored, WeightNodes, scale_rows
from trt_eagle3.graph.weights import Quantised

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Fp8Format", "scale_nodes"]

FLOAT = dtype_named("float32").onnx


class Fp8Format:
    """Implements ``NodeFormat``."""

    def dequantise(self, part: Quantised, stored: Stored, rows: slice) -> Tensor:
        """Return code * scale."""
        return stored["codes"][rows].float() * scale_rows(part, stored["scale"], rows)

    def dequantise_nodes(self, part: Quantised, nodes: WeightNodes) -> str:
        """Add nodes for code * scale."""
        codes = nodes.op("Cast", nodes.stored("codes"), to=FLOAT)
        return nodes.op("Mul", codes, scale_nodes(part, nodes))


def scale_nodes(part: Quantised, nodes: WeightNodes) -> str:
    """Add the scale of every value: float32 [out, in], or of a shape that broadcasts to it."""
    (out, inner), (rows, columns) = part.shape, part.block
    grid = np.array([-(-out // rows), -(-inner // columns)], dtype=np.int64)
    scale = nodes.op("Cast", nodes.stored("scale"), to=FLOAT)
    scale = nodes.op("Reshape", scale, nodes.constant(grid))
    if 1 < rows < out:
        scale = nodes.op("Gather", scale, nodes.constant(np.arange(out) // rows), axis=0)
    if columns < inner:
        scale = nodes.op("Gather", scale, nodes.constant(np.arange(inner) // columns), axis=1)
    return scale
