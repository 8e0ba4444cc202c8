"""TensorRow: rows in tensors that several sequences share, gathered with few launches.

A view and a launch per row would cost the host more time than the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trt_eagle3.host_copy import to_device

__all__ = ["TensorRow", "gather_padded", "gather_rows", "rows_of"]


class TensorRow(NamedTuple):
    """Row ``row`` of ``tensor`` [n, ...]."""

    tensor: Tensor
    row: int


def rows_of(tensor: Tensor, rows: Sequence[int], dim: int = 0) -> Tensor:
    """Return ``tensor`` at ``rows`` of ``dim``; ``tensor`` itself if these are all, in order."""
    if list(rows) == list(range(tensor.shape[dim])):
        return tensor
    return tensor.index_select(dim, to_device(torch.tensor(rows), tensor.device))


def gather_rows(refs: Sequence[TensorRow]) -> Tensor:
    """Gather the rows in order, [len(refs), ...]; the result may be a view."""
    parts, places = _parts(refs)
    every = parts[0] if len(parts) == 1 else torch.cat(parts)
    index = [places[id(ref.tensor), ref.row] for ref in refs]
    return rows_of(every, index)


def gather_padded(refs: Sequence[Sequence[TensorRow]], width: int) -> Tensor:
    """Gather up to ``width`` rows for each entry of ``refs``, [len(refs), width, ...].

    Padding rows have arbitrary content.
    """
    any_row = next(row for of_one in refs for row in of_one)
    padded = [[*of_one, *[any_row] * (width - len(of_one))] for of_one in refs]
    rows = gather_rows([row for of_one in padded for row in of_one])
    return rows.view(len(refs), width, *rows.shape[1:])


def _parts(refs: Sequence[TensorRow]) -> tuple[list[Tensor], dict[tuple[int, int], int]]:
    """Return views of runs of the rows, each row once, and each row's index in these runs."""
    tensors = {id(ref.tensor): ref.tensor for ref in refs}
    needed: dict[int, set[int]] = {key: set() for key in tensors}
    for ref in refs:
        needed[id(ref.tensor)].add(ref.row)
    parts, places = list[Tensor](), dict[tuple[int, int], int]()
    for key, rows in needed.items():
        for first, last in _runs(sorted(rows)):
            for row in range(first, last + 1):
                places[key, row] = len(places)
            parts.append(tensors[key][first : last + 1])
    return parts, places


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return first and last number of every run of consecutive numbers in ``rows`` (ascending)."""
    ends = [i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1]
    return [
        (rows[start], rows[stop - 1])
        for start, stop in zip([0, *ends], [*ends, len(rows)], strict=True)
    ]
