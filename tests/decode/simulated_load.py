"""A server whose cycles take what a table says and whose drafts are right by chance: what a plan
makes of it, without an engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from trt_eagle3.decode.plan import Cycle
from trt_eagle3.decode.sampling_params import GREEDY, SamplingParams

# One H200, 8B geometry, bf16, 1,024 tokens of context: ms of a cycle by batch size, with chains of
# 0 to 3 tokens (trt_eagle3.bench.width on 2026-11-22; 5 is extrapolated). At 8 a chain of 2 costs
# what a chain of 1 does.
H200 = {
    0: {1: 4.12, 8: 4.61, 32: 5.95, 64: 7.25, 128: 10.20},
    1: {1: 4.72, 8: 5.82, 32: 7.15, 64: 9.39, 128: 13.75},
    2: {1: 4.82, 8: 5.80, 32: 7.32, 64: 10.00, 128: 16.32},
    3: {1: 5.07, 8: 6.10, 32: 7.76, 64: 11.24, 128: 19.34},
    5: {1: 5.60, 8: 7.00, 32: 9.50, 64: 15.00, 128: 27.00},
}
TURN = 0.2  # of a plain cycle that the first one takes longer after a tree: nothing was launched
LAGGING = 8  # sequences from which on a cycle is launched before the last one's outcome is known

CycleMs = Callable[[int, int], float]
"""Milliseconds by batch size and depth of the chain."""


def line(points: dict[int, float], x: int) -> float:
    known = sorted(points.items())
    for (x0, y0), (x1, y1) in pairwise(known):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return known[-1][1] * x / known[-1][0]


def h200_ms(batch: int, depth: int) -> float:
    return line(H200[depth], batch)


def dear_ms(batch: int, depth: int) -> float:
    """Every row costs, as where a few tokens fill the machine: nothing is won by a draft."""
    return 2.0 + 0.5 * batch * (1 + depth) ** 0.95 + 0.4 * depth


def moe_ms(batch: int, depth: int) -> float:
    """A mixture of 128 experts of which a token goes through 8, of 30B-A3B's geometry in bf16: the
    time of reading what is touched, at 4 TB/s, and 0.2 ms for each step of the draft.

    Verifying 6 tokens of one sequence reads five times the experts of a plain step.
    """
    rows = batch * (1 + depth)
    touched = 128 * (1 - (1 - 8 / 128) ** rows)
    return (2.43e9 + 453e6 * touched) / 4e9 + 0.003 * rows + 0.2 * depth


def rate_of(length: float, depth: int = 3) -> float:
    """Acceptance of each token of a chain of ``depth`` whose acceptance length is ``length``."""
    low, high = 0.0, 1.0
    for _ in range(50):
        mid = (low + high) / 2
        low, high = (mid, high) if chain_length(mid, depth) < length else (low, mid)
    return low


def chain_length(rate: float, depth: int) -> float:
    return float(sum(rate**i for i in range(depth + 1)))


@dataclass(eq=False)
class Sequence:
    """What a plan looks at in a ``SequenceState``."""

    left: int
    rate: float
    length: int = 1024
    drafting: bool = True
    sampling: SamplingParams = GREEDY
    deferred: list[None] = field(default_factory=list)


@dataclass
class Load:
    """``size`` sequences in flight, each followed by the next when it has its answer.

    Attributes:
        worth: seconds that plain decoding takes for ``tokens``, without noise. depths: levels of
            the tree of every cycle.
    """

    plan: Any
    size: int
    rate: float
    cycle_ms: CycleMs
    answer: int = 400
    noise: float = 0.03
    hiccups: float = 0.002
    seed: int = 0
    catch_up_ms: float = 0.0015  # a row
    tokens: int = 0
    seconds: float = 0.0
    worth: float = 0.0
    depths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.sequences = [self._new(first=True) for _ in range(self.size)]
        self.waiting = 0
        self._ahead: Any = None

    def run(self, cycles: int) -> Load:
        for _ in range(cycles):
            self._step()
        return self

    def _new(self, *, first: bool = False) -> Sequence:
        left = self.chance.randint(1, self.answer) if first else self.answer
        return Sequence(left, self.rate)

    def _step(self) -> None:
        quiet = self.plan.wants_quiet and bool(self.sequences)
        disturbed = self.waiting > 0 and not quiet
        if disturbed:
            self.sequences += [self._new() for _ in range(self.waiting)]
            self.waiting = 0
        tree = self._launched(self.plan.tree_for(self.sequences))
        depth = tree.steps if tree else 0
        self.depths.append(depth)
        switched = depth > 0 and len(self.depths) > 1 and self.depths[-2] == 0
        rows = sum(len(s.deferred) for s in self.sequences) if switched else 0
        ms = self.cycle_ms(len(self.sequences), depth) * self.chance.lognormvariate(0, self.noise)
        if depth == 0 and self.depths[-2:-1] and self.depths[-2]:
            ms += TURN * self.cycle_ms(len(self.sequences), 0)
        if self.chance.random() < self.hiccups:
            ms *= 6  # a capture, or another program
        seconds = (ms + rows * self.catch_up_ms) / 1000
        accepted = [self._accept(s, depth) for s in self.sequences]
        for s, count in zip(self.sequences, accepted, strict=True):
            s.left -= count + 1
            s.length += count + 1
            s.deferred = [] if tree else [*s.deferred, None]
            self.tokens += count + 1
        self.seconds += seconds
        emitted = sum(accepted) + len(accepted)
        self.worth += emitted * self.cycle_ms(len(accepted), 0) / max(len(accepted), 1) / 1000
        self.plan.observe(
            Cycle(
                self.sequences,
                tree,
                [count if tree else None for count in accepted],
                rows,
                None if disturbed else seconds,
            )
        )
        self.waiting += sum(s.left <= 0 for s in self.sequences)
        self.sequences = [s for s in self.sequences if s.left > 0]

    def _launched(self, wanted: Any) -> Any:
        """What runs: as asynchronous cycles are, a plain pass or a crowd's tree was launched before
        ``wanted`` was known.
        """
        ahead, self._ahead = self._ahead, wanted
        before = self.depths[-1] if self.depths else 0
        lags = self.depths and (before == 0 or len(self.sequences) >= LAGGING)
        return ahead if lags else wanted

    def _accept(self, sequence: Sequence, depth: int) -> int:
        count = 0
        while count < depth and self.chance.random() < sequence.rate:
            count += 1
        return count

    @property
    def speed(self) -> float:
        """Tokens per second over those of plain decoding by as many."""
        return self.tokens / self.seconds / (1000 * self.size / self.cycle_ms(self.size, 0))
