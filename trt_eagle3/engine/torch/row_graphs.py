"""A forward over the rows of several parts, captured in pieces as CUDA graphs.

Between two launches of attention a target computes row by row: what is launched there depends on
nothing but the number of rows. That is captured, once for each of few numbers of rows, and
attention is launched between the pieces, for whoever the rows are of. So the host launches two or
three things for each layer where it would launch ten, which takes it longer than the device takes
for a thousand rows. What follows the last attention runs node by node.

Shapes: N rows, their padding included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from trt_eagle3.engine.buckets import CAPTURED_AT_RUN, ROWS
from trt_eagle3.engine.torch.fusion import Step
from trt_eagle3.engine.torch.mixed import context_of
from trt_eagle3.engine.torch.program import with_lifetimes
from trt_eagle3.engine.torch.prompt_nodes import PROMPT_ATTENTION
from trt_eagle3.engine.torch.row_memory import Row, RowMemory, fill_rows

__all__ = ["Recorder", "RowGraphs", "Split", "compute", "computed", "split_at_attention"]

_ATTENTION = {"TreeAttention", PROMPT_ATTENTION}

Inputs = Mapping[str, Tensor]
Values = dict[str, Any]


@dataclass(frozen=True)
class Split:
    """The steps of a forward, cut before each attention.

    Attributes:
        pieces: what is computed before each attention. attention: that after each piece but the
            last one. tail, prompt_tail: from the last attention on, of all rows, and where only
            some are read.
        left: values of pieces that attention or a tail reads.
    """

    pieces: Sequence[Sequence[Step]]
    attention: Sequence[Step]
    tail: Sequence[Step]
    prompt_tail: Sequence[Step]
    left: frozenset[str]


def split_at_attention(steps: Sequence[Step], prompt_steps: Sequence[Step]) -> Split:
    """``steps`` cut; ``prompt_steps``: the same up to the last attention; none: ``steps``."""
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


def compute(step: Step, values: Values) -> None:
    """Put what ``step`` makes among ``values``, and let go of what nothing after it needs."""
    found = step.function(*(values[name] for name in step.inputs), **step.attributes)
    values.update(zip(step.outputs, found if isinstance(found, tuple) else (found,), strict=True))
    for name in step.done_with:
        del values[name]


class Recorder(Protocol):
    """What captures pieces (``cuda_graph.PieceRecorder``)."""

    def recording(self) -> AbstractContextManager[None]:
        """Within it ``record`` may be called."""
        ...

    def record(self, work: Callable[[], Values]) -> tuple[Any, Values]:
        """What ``replay`` of the first runs again, over the same memory; and what it returned."""
        ...


@dataclass(frozen=True)
class _Captured:
    """The graphs of one N.

    Attributes:
        inputs: what they read: by name, axes of rows (1, N). attended: likewise, what attention
            says, T [N, Hq * D]. left: what they leave to attention and the tails.
    """

    graphs: Sequence[Any]
    inputs: Mapping[str, Tensor]
    attended: Tensor
    left: Mapping[str, Any]


class RowGraphs:
    """A target's graphs, of every N that was captured."""

    def __init__(
        self,
        split: Split,
        constants: Mapping[str, Any],
        inputs: Mapping[str, Row],
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        """Capture ``split``; ``inputs``: what its pieces read of each row. ``constants``: the
        program's.
        """
        self.split = split
        self._constants = constants
        self._inputs = inputs
        self._recorder = recorder
        self._runs: Counter[int] = Counter()
        self._captured: dict[int, _Captured] = {}
        self._memory = RowMemory(device)

    def run(self, parts: Sequence[Inputs], bound: Mapping[str, Tensor]) -> Values | None:
        """Run ``parts``, which are on the device, up to the last attention: what the tails read of
        N rows. None where graphs of these are not captured: it counts how often they are wanted.

        ``bound``: the caches.
        """
        count = sum(part["tree_mask"].shape[:2].numel() for part in parts)
        captured = self._get(ROWS.size_of(count)) if count <= ROWS.limit else None
        if captured is None:
            return None
        fill_rows(captured.inputs, parts)
        values = {**self._constants, **bound, **captured.left, **captured.inputs}
        values |= context_of(parts, captured.attended)
        for graph, step in zip_longest(captured.graphs, self.split.attention):
            graph.replay()
            if step is not None:
                compute(step, values)
        return values

    def capture(self, most: int, has_room: Callable[[], bool]) -> int:
        """Capture every N for up to ``most`` rows while ``has_room``; how many there are then."""
        for count in reversed(ROWS.sizes(min(most, ROWS.limit))):
            if count in self._captured:
                continue
            if not has_room():
                break
            self._compute(count, _run)  # loads kernels, which may not be while capturing
            self._captured[count] = self._capture(count)
        return len(self._captured)

    def _get(self, count: int) -> _Captured | None:
        if count not in self._captured:
            self._runs[count] += 1
            if self._runs[count] < CAPTURED_AT_RUN:
                return None
            self._captured[count] = self._capture(count)
        return self._captured[count]

    def _capture(self, count: int) -> _Captured:
        with self._recorder.recording():
            return self._compute(count, self._recorder.record)

    def _compute(
        self, count: int, record: Callable[[Callable[[], Values]], tuple[Any, Values]]
    ) -> _Captured:
        """Run all pieces over ``count`` rows, each by ``record``, attention left out."""
        inputs = {name: self._memory.rows(name, row, count) for name, row in self._inputs.items()}
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
        return _Captured(graphs, inputs, attended, left)


def _run(work: Callable[[], Values]) -> tuple[None, Values]:
    return None, work()


def computed(steps: Sequence[Step], given: Values) -> Values:
    """``given`` after ``steps``."""
    values = dict(given)
    for step in steps:
        compute(step, values)
    return values


class _Address:
    """Memory that belongs to somebody else, as ``torch.as_tensor`` takes it (CUDA Array Interface
    3).
    """

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def _unowned(value: Any) -> Any:
    """A CUDA tensor over the same memory, which this one does not keep: the pieces that follow may
    be given it once nothing of theirs reads it.
    """
    if not isinstance(value, Tensor) or not value.is_cuda:
        return value
    pairs = zip(value.shape, value.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    address = _Address(value.data_ptr(), extent * value.element_size())
    flat = torch.as_tensor(address, device=value.device).view(value.dtype)
    return flat.as_strided(value.shape, value.stride())
