"""Whole forwards as CUDA graphs: one for each set of input shapes that comes again."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from trt_eagle3.engine.runtime.buckets import CAPTURED_AT_RUN, MAX_WHOLE_WIDTH, PATCHES
from trt_eagle3.host_copy import to_device

__all__ = [
    "Captured",
    "CapturedGraphs",
    "Shapes",
    "shapes_of",
]

_MAX_COMPARED = 1 << 14  # elements at once
# Within so many runs of shapes that are not captured. Over days every length of a prompt comes
# again: a capture takes as long as several steps, and its graph would push out one of those.
_RECENT_RUNS = 64
# Rows of a captured run at most: launches of larger ones are hidden behind their work, and their
# buffers are large. Steps of many sequences have more rows than a prompt that is worth capturing.
_MAX_ROWS = {
    "inputs_embeds": 1024,
    "aux_hidden_states": 1024,
    "patches": PATCHES.limit,
}
_MAX_GRAPHS = 192  # of a session: 20 batch sizes times the widths of a tree
# of all graphs of a session together: what they keep of memory follows their rows
_MAX_GRAPH_ROWS = 24576

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def shapes_of(inputs: Mapping[str, Tensor]) -> Shapes:
    """What tells one set of input shapes from another."""
    return tuple(sorted((name, tuple(tensor.shape)) for name, tensor in inputs.items()))


def _rows(shapes: Shapes) -> dict[str, int]:
    """Rows of the inputs whose rows count."""
    return {name: prod(shape[:-1]) for name, shape in shapes if name in _MAX_ROWS}


@dataclass(frozen=True)
class Captured:
    """A CUDA graph of one set of input shapes, with the buffers that it reads and writes.

    ``keep``: what must live as long as the graph does.
    """

    graph: torch.cuda.CUDAGraph
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    keep: object = None
    _last: dict[str, Tensor] = field(default_factory=dict)

    def fill(self, inputs: Mapping[str, Tensor]) -> None:
        """Copy ``inputs`` into the graph's; those from the host only where they differ from the
        last run's.
        """
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, tensor in inputs.items():
            on_host = tensor.device.type == "cpu"
            if on_host and name in self._last and _are_equal(self._last[name], tensor):
                continue
            self._last.pop(name, None)
            if not on_host and tensor.is_contiguous():
                by_dtype.setdefault(tensor.dtype, []).append(name)
                continue
            static = self.inputs[name]
            static.copy_(to_device(tensor, static.device), non_blocking=True)
            if on_host:
                self._last[name] = tensor.clone()  # the caller may write into its own again
        for names in by_dtype.values():  # one launch for all of a type
            torch._foreach_copy_([self.inputs[n] for n in names], [inputs[n] for n in names])

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Replay over ``inputs``; the outputs are the graph's own, which the next replay
        overwrites.
        """
        self.fill(inputs)
        self.graph.replay()
        return dict(self.outputs)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """``torch.equal`` on the host, in this thread: torch's other threads, which it has compare from
    32,768 elements on, may take milliseconds to wake up.
    """
    if one.shape != other.shape or not one.ndim:
        return torch.equal(one, other)
    rows = max(_MAX_COMPARED // max(prod(one.shape[1:]), 1), 1)
    return all(map(torch.equal, one.split(rows), other.split(rows)))


class CapturedGraphs:
    """A session's captured graphs: of the shapes that came again, those used last."""

    def __init__(self, most: int = _MAX_GRAPHS, most_rows: int = _MAX_GRAPH_ROWS) -> None:
        self._most = most
        self._most_rows = most_rows
        self._recent = deque[Shapes]()  # that ran without being captured
        self._runs: Counter[Shapes] = Counter()  # of each in ``_recent``
        self._graphs: OrderedDict[Shapes, Captured] = OrderedDict()

    @property
    def pool(self) -> Any:
        """The memory of those that there are, for the next one; None where there are none."""
        return next((c.graph.pool() for c in self._graphs.values()), None)

    def get(self, shapes: Shapes) -> Captured | None:
        """The graph of these shapes, if they have been captured."""
        captured = self._graphs.get(shapes)
        if captured is not None:
            self._graphs.move_to_end(shapes)
        return captured

    def due(self, shapes: Shapes) -> bool:
        """Count a run of these shapes; whether they came often enough of late to be captured."""
        if any(rows > _MAX_ROWS[name] for name, rows in _rows(shapes).items()) or any(
            name == "inputs_embeds" and shape[1] > MAX_WHOLE_WIDTH for name, shape in shapes
        ):
            return False
        self._recent.append(shapes)
        self._runs[shapes] += 1
        if len(self._recent) > _RECENT_RUNS:
            self._runs -= Counter([self._recent.popleft()])
        return self._runs[shapes] >= CAPTURED_AT_RUN

    def add(self, shapes: Shapes, captured: Captured) -> Captured:
        """Keep a new graph; those that were not used for the longest time make room."""
        self._graphs[shapes] = captured
        while len(self._graphs) > self._most or self._num_rows() > self._most_rows:
            torch.cuda.synchronize()  # it may still run
            self._graphs.popitem(last=False)
        return captured

    def _num_rows(self) -> int:
        return sum(max(_rows(shapes).values(), default=0) for shapes in self._graphs)

    def clear(self) -> None:
        """Forget all graphs, because what they were captured over has changed."""
        self._graphs.clear()
