"""AWQ: INT4 in int32 [in, out / 8], packed along the rows in AutoAWQ's order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.graph.formats.format import (
    IntegerFormat,
    IntegerRows,
    Stored,
    groups_of,
    unpacked,
)
from trt_eagle3.graph.weights import Quantised

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AWQ_ORDER", "AwqFormat"]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The row in each place of an int32, of eight rows, lowest bits first."""
_PLACES = tuple(AWQ_ORDER.index(row) for row in range(8))


class AwqFormat(IntegerFormat):
    """AWQ. Zero points are packed like the numbers."""

    def rows(self, part: Quantised, stored: Stored, rows: slice) -> IntegerRows:
        """Implement ``IntegerFormat.rows``."""
        scales = stored["scale"][:, rows].T.float()
        zeros = _columns(stored["zero_point"], rows).T
        codes = _columns(stored["codes"], rows).T
        return IntegerRows(codes, zeros, scales, groups_of(part, stored))


def _columns(words: Tensor, wanted: slice) -> Tensor:
    """Return uint8 [r, n]: the ``wanted`` columns of the numbers in ``words`` int32 [r, c / 8]."""
    first, end, _ = wanted.indices(words.shape[1] * 8)
    start = first // 8
    taken = words[:, start : -(-end // 8)]
    numbers: Tensor = unpacked(taken, 4).unflatten(1, (-1, 8))[..., list(_PLACES)].flatten(1)
    return numbers[:, first - 8 * start : end - 8 * start]
