"""Slices of a weight, as weight expressions: rows and columns of what a ``WeightExpr`` makes.

A slice is an expression of the same tensors on disk. So a rank of several GPUs reads only its own
rows and columns, whatever the weight's format and layout are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from trt_eagle3.graph.weights import WeightExpr, WeightPart
from trt_eagle3.sharding import Range

__all__ = ["block_of", "take_columns", "take_rows"]


def take_rows(expr: WeightExpr, ranges: Sequence[Range]) -> WeightExpr:
    """Return the weight of the rows in ``ranges``, in their order.

    Rows are counted over the stacked parts (``WeightExpr.stacked_shape``). Of experts, all must
    keep the same number of rows.
    """
    ends = list(accumulate(part.made_shape[0] for part in expr.parts))
    parts: list[WeightPart] = []
    for first, end in ranges:
        assert 0 <= first < end <= ends[-1], f"rows {first} to {end} of {expr.shape}"
        at = bisect_right(ends, first)
        while first < end:
            start, stop = ends[at - 1] if at else 0, min(end, ends[at])
            parts.append(_narrowed(expr.parts[at], 0, (first - start, stop - start)))
            first, at = stop, at + 1
    return replace(expr, parts=tuple(parts))


def take_columns(expr: WeightExpr, columns: Range) -> WeightExpr:
    """Return the weight of ``columns`` of every row."""
    first, end = columns
    assert 0 <= first < end <= expr.stacked_shape[1], f"columns {columns} of {expr.shape}"
    return replace(expr, parts=tuple(_narrowed(part, 1, columns) for part in expr.parts))


def block_of(expr: WeightExpr) -> tuple[int, int]:
    """Return the rows and columns of the weight that share a scale; (1, 1) if it is dense.

    A slice at multiples of them stays quantised. A block as large as the part counts as 1, because
    any slice keeps its scale.
    """
    rows, columns = 1, 1
    for part in expr.parts:
        if part.quantised is None:
            continue
        block = [
            1 if size >= whole else size
            for size, whole in zip(part.quantised.block, part.quantised.shape, strict=True)
        ]
        if part.transpose:
            block.reverse()
        rows, columns = max(rows, block[0]), max(columns, block[1])
    return rows, columns


def _narrowed(part: WeightPart, axis: int, taken: Range) -> WeightPart:
    """Narrow a part to the range ``taken`` of an axis of what it makes."""
    if taken == (0, part.made_shape[axis]):
        return part
    by_rows = axis == (1 if part.transpose else 0)
    first = (part.row_range if by_rows else part.column_range)[0]
    found = (first + taken[0], first + taken[1])
    return replace(part, rows=found) if by_rows else replace(part, columns=found)
