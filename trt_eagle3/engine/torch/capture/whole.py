"""Whole forwards as CUDA graphs: one for each set of input shapes that repeats."""

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
# A set of shapes is due if it repeats within this many uncaptured runs. Over days, every prompt
# length repeats. A capture takes as long as several steps, and its graph would evict another.
_RECENT_RUNS = 64
# Most rows of a captured run. The device's work hides the launches of larger runs, and their
# buffers are large. Steps of many sequences have more rows than a prompt that is worth capturing.
_MAX_ROWS = {
    "inputs_embeds": 1024,
    "aux_hidden_states": 1024,
    "patches": PATCHES.limit,
}
_MAX_GRAPHS = 192  # of a session: 20 batch sizes times the widths of a tree
# over all graphs of a session: their memory grows with their rows
_MAX_GRAPH_ROWS = 24576

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def shapes_of(inputs: Mapping[str, Tensor]) -> Shapes:
    """Return a key that identifies a set of input shapes."""
    return tuple(sorted((name, tuple(tensor.shape)) for name, tensor in inputs.items()))


def _rows(shapes: Shapes) -> dict[str, int]:
    """Return the number of rows of each input that is limited by rows."""
    return {name: prod(shape[:-1]) for name, shape in shapes if name in _MAX_ROWS}


@dataclass(frozen=True)
class Captured:
    """A CUDA graph for one set of input shapes, with its input and output buffers.

    ``keep``: an object that must live as long as the graph.
    """

    graph: torch.cuda.CUDAGraph
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    keep: object = None
    _last: dict[str, Tensor] = field(default_factory=dict)

    def fill(self, inputs: Mapping[str, Tensor]) -> None:
        """Copy ``inputs`` into the graph's buffers. Inputs from the host are copied only if they
        differ from those of the last run.
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
                self._last[name] = tensor.clone()  # the caller may overwrite its own tensor
        for names in by_dtype.values():  # one launch for each type
            torch._foreach_copy_([self.inputs[n] for n in names], [inputs[n] for n in names])

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Replay over ``inputs``; return the graph's output buffers, which the next replay
        overwrites.
        """
        self.fill(inputs)
        self.graph.replay()
        return dict(self.outputs)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Compare on the host like ``torch.equal``, but in this thread. From 32,768 elements on, torch
    uses other threads, which may take milliseconds to wake up.
    """
    if one.shape != other.shape or not one.ndim:
        return torch.equal(one, other)
    rows = max(_MAX_COMPARED // max(prod(one.shape[1:]), 1), 1)
    return all(map(torch.equal, one.split(rows), other.split(rows)))


class CapturedGraphs:
    """A session's captured graphs: those of repeated shapes, the most recently used."""

    def __init__(self, most: int = _MAX_GRAPHS, most_rows: int = _MAX_GRAPH_ROWS) -> None:
        self._most = most
        self._most_rows = most_rows
        self._recent = deque[Shapes]()  # latest runs without a graph
        self._runs: Counter[Shapes] = Counter()  # of each in ``_recent``
        self._graphs: OrderedDict[Shapes, Captured] = OrderedDict()

    @property
    def pool(self) -> Any:
        """The memory pool of the existing graphs, for the next one; None without graphs."""
        return next((c.graph.pool() for c in self._graphs.values()), None)

    def get(self, shapes: Shapes) -> Captured | None:
        """Return the graph of these shapes, if they have been captured."""
        captured = self._graphs.get(shapes)
        if captured is not None:
            self._graphs.move_to_end(shapes)
        return captured

    def due(self, shapes: Shapes) -> bool:
        """Count a run of these shapes; return whether they repeat often enough to capture them."""
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
        """Add a new graph; evict the least recently used ones beyond the limits."""
        self._graphs[shapes] = captured
        while len(self._graphs) > self._most or self._num_rows() > self._most_rows:
            torch.cuda.synchronize()  # the evicted graph may still run
            self._graphs.popitem(last=False)
        return captured

    def _num_rows(self) -> int:
        return sum(max(_rows(shapes).values(), default=0) for shapes in self._graphs)

    def clear(self) -> None:
        """Drop all graphs, because their bound buffers have changed."""
        self._graphs.clear()
