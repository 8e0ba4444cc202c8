"""Memory that captured graphs read their rows from: one for all numbers of rows.

Shapes: N rows, their padding included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from trt_eagle3.engine.torch.mixed import flat_rows, row_axis

__all__ = ["Row", "RowMemory", "fill_rows"]


@dataclass(frozen=True)
class Row:
    """An input of a graph: its type and shape, where batch and width are 0."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class RowMemory:
    """Tensors by name, each the beginning of the largest one, which is asked for first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._largest: dict[str, Tensor] = {}

    def rows(self, name: str, row: Row, count: int) -> Tensor:
        """Memory for ``count`` rows of an input, of one sequence."""
        shape = list(row.shape)
        shape[row_axis(name) - 1], shape[row_axis(name)] = 1, count
        return self.part_of(name, row.dtype, shape)

    def part_of(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Memory of ``shape``."""
        largest, size = self._largest.get(name), prod(shape)
        if largest is None or largest.numel() < size:
            largest = torch.zeros(*shape, dtype=dtype, device=self._device)
            self._largest[name] = largest
        return largest.view(-1)[:size].view(*shape)

    def whole(self, name: str) -> Tensor:
        """The largest one."""
        return self._largest[name]


def fill_rows(memory: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]]) -> None:
    """Copy the rows of ``parts`` into ``memory``, of inputs by name; those that follow are 0."""
    for name, static in memory.items():
        axis, start = row_axis(name), 0
        there = flat_rows(name, static)
        for part in parts:
            rows = flat_rows(name, part[name])
            there.narrow(axis, start, rows.shape[axis]).copy_(rows)
            start += rows.shape[axis]
        if start < there.shape[axis]:
            there.narrow(axis, start, there.shape[axis] - start).zero_()
