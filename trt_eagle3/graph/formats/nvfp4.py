"""NVFP4: e2m1 numbers, two per byte, times a scale per 16 numbers and a global scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trt_eagle3.graph.formats.format import Stored, WeightNodes, scale_rows
from trt_eagle3.graph.formats.fp8 import scale_nodes
from trt_eagle3.graph.weights import Quantised

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["E2M1", "Nvfp4Format"]

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_SIZES, *(-size for size in _SIZES))
"""The values of the sixteen codes."""


class Nvfp4Format:
    """Implements ``NodeFormat``. ``divides``: whether the global scale is a divisor."""

    def __init__(self, *, divides: bool) -> None:
        self._divides = divides

    def dequantise(self, part: Quantised, stored: Stored, rows: slice) -> Tensor:
        """Return code * scale * global scale, or code * scale / global scale."""
        import torch

        codes = self.codes(stored, rows)[:, : part.shape[1]]
        table = torch.tensor(E2M1, device=codes.device)
        scales = scale_rows(part, stored["scale"], rows)
        whole = stored["global_scale"].float().reshape(1, 1)
        return table[codes.int()] * (scales / whole if self._divides else scales * whole)

    def codes(self, stored: Stored, rows: slice) -> Tensor:
        """Return uint8 [n, in]: the e2m1 numbers of ``rows``, 0 to 15."""
        import torch

        pairs = stored["codes"][rows]
        return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)

    def whole_scale(self, stored: Stored) -> Tensor:
        """Return float32 [1, 1]: the factor of all values."""
        whole = stored["global_scale"].float().reshape(1, 1)
        return 1 / whole if self._divides else whole

    def dequantise_nodes(self, part: Quantised, nodes: WeightNodes) -> str:
        """Add nodes for ``dequantise``. A byte is looked up as a pair of values."""
        pairs = np.array([[E2M1[b & 15], E2M1[b >> 4]] for b in range(256)], dtype=np.float32)
        index = nodes.op("Cast", nodes.stored("codes"), to=7)
        found = nodes.op("Gather", nodes.constant(pairs), index, axis=0)
        shape = np.array([part.shape[0], -1], dtype=np.int64)
        values = nodes.op("Reshape", found, nodes.constant(shape))
        ends = [nodes.constant(np.array([n], dtype=np.int64)) for n in (0, part.shape[1], 1)]
        values = nodes.op("Slice", values, *ends[:2], ends[2])
        one = np.array([1, 1], dtype=np.int64)
        whole = nodes.op("Reshape", nodes.stored("global_scale"), nodes.constant(one))
        scale = nodes.op("Div" if self._divides else "Mul", scale_nodes(part, nodes), whole)
        return nodes.op("Mul", values, scale)
