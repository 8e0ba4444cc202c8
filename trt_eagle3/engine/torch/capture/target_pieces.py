"""A target's forward over the rows of several parts, captured in pieces.

Attention is launched between the pieces, for any assignment of rows to sequences. So the host makes
two or three launches for each layer instead of ten. Ten launches would take longer than the device
takes for a thousand rows. Nodes after the last attention run one by one.

Shapes: N rows, their padding included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from trt_eagle3.engine.runtime.buckets import CAPTURED_AT_RUN, ROWS
from trt_eagle3.engine.torch.capture.pieces import CapturedPieces, RowFormat, Split, fill_rows
from trt_eagle3.engine.torch.capture.recorder import Record, Recorder
from trt_eagle3.engine.torch.mixed import context_of
from trt_eagle3.engine.torch.program import Step, Values, compute, computed

__all__ = ["TargetPieces"]


@dataclass(frozen=True)
class _Graphs:
    """The graphs of one N.

    Attributes:
        pieces: one graph for each piece.
        inputs: the graphs' inputs, by name; the axes of rows are (1, N).
        attended: the output of attention that the next piece reads, T [N, Hq * D].
        left: values that attention and the tails read, by name.
    """

    pieces: Sequence[Any]
    inputs: Mapping[str, Tensor]
    attended: Tensor
    left: Mapping[str, Any]


class TargetPieces(CapturedPieces[_Graphs]):
    """The graphs of a target. A size that is not captured at start is captured at its third run."""

    def __init__(
        self,
        split: Split,
        constants: Mapping[str, Any],
        inputs: Mapping[str, RowFormat],
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        """See ``CapturedPieces``; ``constants``: the program's."""
        super().__init__(split, constants, inputs, recorder, device)
        self._runs: Counter[int] = Counter()

    def run(
        self, parts: Sequence[Mapping[str, Tensor]], bound: Mapping[str, Tensor], *, picked: bool
    ) -> tuple[Values, Sequence[Step]] | None:
        """Run ``parts``, which are on the device, up to the last attention.

        Args:
            bound: the caches. picked: the remaining steps compute only the rows that are read.
        Returns:
            The remaining steps, and the values of N rows that they read. None if there are no
            graphs for ``parts``; such runs are counted.
        """
        count = sum(part["tree_mask"].shape[:2].numel() for part in parts)
        graphs = self._get(ROWS.size_of(count)) if count <= ROWS.limit else None
        if graphs is None:
            return None
        fill_rows(graphs.inputs, parts)
        values = {**self._constants, **bound, **graphs.left, **graphs.inputs}
        values |= context_of(parts, graphs.attended)
        for graph, step in zip_longest(graphs.pieces, self.split.attention):
            graph.replay()
            if step is not None:
                compute(step, values)
        return values, self.split.prompt_tail if picked else self.split.tail

    def _get(self, count: int) -> _Graphs | None:
        if count not in self._captured:
            self._runs[count] += 1
            if self._runs[count] < CAPTURED_AT_RUN:
                return None
            self._captured[count] = self._record(count, ahead=False)
        return self._captured[count]

    def _compute(self, count: int, record: Record) -> _Graphs:
        inputs = self._rows(count)
        values: Values = {**self._constants, **inputs}
        graphs: list[Any] = []
        left: Values = {}
        attended = torch.empty(0)
        for piece, attention in zip_longest(self.split.pieces, self.split.attention):
            graph, values = record(partial(computed, piece, dict(values)))
            graphs.append(graph)
            left |= {n: _unowned(values[n]) for n in self.split.left.intersection(values)}
            if attention is not None:
                q = values[attention.inputs[0]]
                attended = self._memory.part_of("attended", q.dtype, q.shape)
                values[attention.outputs[0]] = attended
                for name in attention.done_with:
                    values.pop(name, None)
        return _Graphs(graphs, inputs, attended, left)


class _Address:
    """Memory of another owner, as ``torch.as_tensor`` takes it (CUDA Array Interface 3)."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def _unowned(value: Any) -> Any:
    """Return a CUDA tensor over the memory of ``value`` that does not own it, so that later pieces
    may be given that memory once none of them reads ``value``.
    """
    if not isinstance(value, Tensor) or not value.is_cuda:
        return value
    pairs = zip(value.shape, value.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    address = _Address(value.data_ptr(), extent * value.element_size())
    flat = torch.as_tensor(address, device=value.device).view(value.dtype)
    return flat.as_strided(value.shape, value.stride())
