"""GPTQ: INT4 in int32 [in / 8, out], packed along the columns."""

from __future__ import annotations

from trt_eagle3.graph.formats.format import (
    IntegerFormat,
    IntegerRows,
    Stored,
    groups_of,
    unpacked,
)
from trt_eagle3.graph.weights import Quantised

__all__ = ["GptqFormat"]

_ONES = 0x11111111
"""Subtracted by version 1 from every packed element of the zero points."""


class GptqFormat(IntegerFormat):
    """GPTQ. ``less_one``: whether stored zero points are lower by 1, as in version 1."""

    def __init__(self, bits: int, *, less_one: bool) -> None:
        super().__init__(bits)
        self._add = _ONES if less_one else 0

    def rows(self, part: Quantised, stored: Stored, rows: slice) -> IntegerRows:
        """Implement ``IntegerFormat.rows``."""
        codes = unpacked(stored["codes"][:, rows].T.contiguous(), self.bits)
        packed = (stored["zero_point"].long() + self._add).int()
        zeros = unpacked(packed, self.bits)[:, rows].T
        return IntegerRows(
            codes, zeros, stored["scale"][:, rows].T.float(), groups_of(part, stored)
        )
