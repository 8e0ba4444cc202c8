"""INT8: signed numbers, one per byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.graph.formats.format import IntegerFormat, IntegerRows, Stored, groups_of
from trt_eagle3.graph.weights import Quantised

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Int8Format"]


class Int8Format(IntegerFormat):
    """compressed-tensors' ``int-quantized``, with or without zero points."""

    def rows(self, part: Quantised, stored: Stored, rows: slice) -> IntegerRows:
        """Implement ``IntegerFormat.rows``. Codes are the numbers + 128."""
        import torch

        codes = _raised(stored["codes"][rows])
        scales = self._grid(part, stored["scale"].float(), rows)
        zeros = torch.full_like(scales, 128, dtype=torch.uint8)
        if "zero_point" in stored:
            zeros = self._grid(part, _raised(stored["zero_point"]), rows)
        return IntegerRows(codes, zeros, scales, groups_of(part, stored))

    def _grid(self, part: Quantised, values: Tensor, rows: slice) -> Tensor:
        """Return [n, G]: the row of the scale grid for each of ``rows``."""
        import torch

        first, end, _ = rows.indices(part.shape[0])
        grid = values.reshape(-1, -(-part.shape[1] // part.block[1]))
        return grid[torch.arange(first, end, device=grid.device) // part.block[0]]


def _raised(numbers: Tensor) -> Tensor:
    return (numbers.short() + 128).byte()
