"""compressed-tensors' ``pack-quantized``: INT4 or INT8 in int32, packed along the columns."""

from __future__ import annotations

from trt_eagle3.graph.formats.format import (
    IntegerFormat,
    IntegerRows,
    Stored,
    groups_of,
    unpacked,
)
from trt_eagle3.graph.weights import Quantised

__all__ = ["PackQuantizedFormat"]


class PackQuantizedFormat(IntegerFormat):
    """Codes and zero points are the numbers + 2^(bits - 1). Zero points are packed along rows."""

    def rows(self, part: Quantised, stored: Stored, rows: slice) -> IntegerRows:
        """Implement ``IntegerFormat.rows``."""
        import torch

        codes = unpacked(stored["codes"][rows], self.bits)[:, : part.shape[1]]
        scales = stored["scale"][rows].float()
        zeros = torch.full_like(scales, 1 << (self.bits - 1), dtype=torch.uint8)
        if "zero_point" in stored:
            packed = stored["zero_point"].T.contiguous()
            zeros = unpacked(packed, self.bits)[:, : part.shape[0]].T[rows]
        return IntegerRows(codes, zeros, scales, groups_of(part, stored))
