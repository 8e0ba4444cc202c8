"""Shared parts of the captured pieces of target and draft: where a forward is cut, the memory of
the graphs' rows, and the capture of every number of rows.

A forward is cut before each attention. Between two attentions it computes row by row, so the
launches there depend only on the number of rows.

Shapes: N rows, their padding included.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from trt_eagle3.engine.runtime.buckets import ROWS
from trt_eagle3.engine.torch.capture.recorder import Record, Recorder, record_pieces
from trt_eagle3.engine.torch.mixed import flat_rows, row_axis
from trt_eagle3.engine.torch.program import Step, with_lifetimes
from trt_eagle3.engine.torch.prompt_nodes import PROMPT_ATTENTION

__all__ = ["CapturedPieces", "RowFormat", "RowBuffers", "Split", "fill_rows", "split_at_attention"]

_ATTENTION = {"TreeAttention", PROMPT_ATTENTION}
C = TypeVar("C")


@dataclass(frozen=True)
class Split:
    """The steps of a forward, cut before each attention.

    Attributes:
        pieces: the steps before each attention, which compute row by row.
        attention: the attention after each piece but the last one.
        tail: the last attention and the steps after it, over all rows.
        prompt_tail: the tail if only some rows are read.
        left: values of pieces that an attention or a tail reads.
    """

    pieces: Sequence[Sequence[Step]]
    attention: Sequence[Step]
    tail: Sequence[Step]
    prompt_tail: Sequence[Step]
    left: frozenset[str]


def split_at_attention(steps: Sequence[Step], prompt_steps: Sequence[Step] = ()) -> Split:
    """Cut ``steps`` before each attention. ``prompt_steps``, if any, must be the same steps up to
    the last attention; they give ``prompt_tail``.
    """
    prompt_steps = prompt_steps or steps
    cuts = [i for i, step in enumerate(steps) if step.op in _ATTENTION]
    last = max(i for i, step in enumerate(prompt_steps) if step.op in _ATTENTION)
    body = [s.outputs for s in steps[: cuts[-1]]]
    assert body == [s.outputs for s in prompt_steps[:last]], "other steps before the last attention"
    tails = (steps[cuts[-1] :], prompt_steps[last:])
    of_tails = {name for tail in tails for step in tail for name in step.inputs}
    alive = with_lifetimes(steps[: cuts[-1]], of_tails)
    starts = [0, *(cut + 1 for cut in cuts[:-1])]
    pieces = [alive[start:cut] for start, cut in zip(starts, cuts, strict=True)]
    attention = [alive[cut] for cut in cuts[:-1]]
    read = of_tails.union(*(step.inputs for step in attention))
    made = {name for piece in pieces for step in piece for name in step.outputs}
    return Split(pieces, attention, *tails, frozenset(read & made))


@dataclass(frozen=True)
class RowFormat:
    """Type and shape of a graph's input; batch and width are 0 in the shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class RowBuffers:
    """Tensors by name, each a prefix of the largest one, which must be requested first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._largest: dict[str, Tensor] = {}

    def rows(self, name: str, row: RowFormat, count: int) -> Tensor:
        """Return memory for ``count`` rows of an input, in one sequence."""
        shape = list(row.shape)
        shape[row_axis(name) - 1], shape[row_axis(name)] = 1, count
        return self.part_of(name, row.dtype, shape)

    def part_of(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return memory of ``shape``."""
        largest, size = self._largest.get(name), prod(shape)
        if largest is None or largest.numel() < size:
            largest = torch.zeros(*shape, dtype=dtype, device=self._device)
            self._largest[name] = largest
        return largest.view(-1)[:size].view(*shape)

    def whole(self, name: str) -> Tensor:
        """Return the largest tensor of ``name``."""
        return self._largest[name]


def fill_rows(memory: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]]) -> None:
    """Copy the rows of ``parts`` into ``memory``, by input name; the rows after them become 0."""
    for name, static in memory.items():
        axis, start = row_axis(name), 0
        there = flat_rows(name, static)
        for part in parts:
            rows = flat_rows(name, part[name])
            there.narrow(axis, start, rows.shape[axis]).copy_(rows)
            start += rows.shape[axis]
        if start < there.shape[axis]:
            there.narrow(axis, start, there.shape[axis] - start).zero_()


class CapturedPieces(ABC, Generic[C]):
    """The graphs ``C`` of every captured N."""

    def __init__(
        self,
        split: Split,
        constants: Mapping[str, Any],
        inputs: Mapping[str, RowFormat],
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        """Capture ``split``; ``inputs``: what its pieces read of each row. ``constants``: values
        that never change.
        """
        self.split = split
        self._constants = constants
        self._inputs = inputs
        self._recorder = recorder
        self._captured: dict[int, C] = {}
        self._memory = RowBuffers(device)

    def capture(self, most: int, has_room: Callable[[], bool]) -> int:
        """Capture every N for up to ``most`` rows while ``has_room``. The largest is first, so that
        the others fit into its memory. Returns how many N have graphs.
        """
        for count in reversed(ROWS.sizes(min(most, ROWS.limit))):
            if count in self._captured:
                continue
            if not has_room():
                break
            self._captured[count] = self._record(count, ahead=True)
        return len(self._captured)

    def _record(self, count: int, *, ahead: bool) -> C:
        return record_pieces(self._recorder, partial(self._compute, count), ahead=ahead)

    def _rows(self, count: int) -> dict[str, Tensor]:
        """Return the memory of ``count`` rows of each input."""
        return {name: self._memory.rows(name, row, count) for name, row in self._inputs.items()}

    @abstractmethod
    def _compute(self, count: int, record: Record) -> C:
        """Run all pieces over ``count`` rows, each by ``record``, without the attention."""
