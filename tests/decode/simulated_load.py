"""A server whose cycles take what a table says and whose drafts are right by chance: what a plan
makes of it, without an engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trt_eagle3.bench.modelled_times import cycle_ms
from trt_eagle3.decode.plan import Cycle
from trt_eagle3.decode.sampling_params import GREEDY, SamplingParams

TURN = 0.2  # of a plain cycle that the first one takes longer after a tree: nothing was launched
LEAST_RIDE = 0.05  # of a plain cycle that a riding step takes at least
LAGGING = 8  # sequences from which on a cycle is launched before the last one's outcome is known

CycleMs = Callable[[int, int], float]
"""Milliseconds by batch size and depth of the chain."""

h200_ms: CycleMs = cycle_ms


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


def idle_ms(batch: int, depth: int) -> float:
    """The tiny trained pair on an H200 whose host does nothing else, as it is primed: 0.5 ms of 8
    plainly, 2.0 with a chain of 5 (``bench.served_load``, 2026-11-26, between those reckoned).
    """
    return 0.45 + 0.006 * batch + 0.3 * depth


def busy_ms(batch: int, depth: int) -> float:
    """The same beside a host that prepares prompts and sends answers to 128 clients: 0.93 ms of 8,
    2.4 of 32; 5.8 of 8 with a chain of 5.
    """
    return 2.9 * idle_ms(batch, depth) if depth else 0.44 + 0.061 * batch


def waiting_ms(batch: int, depth: int) -> float:
    """As ``idle_ms`` with 1.5 ms more in every cycle, for which the host is busy otherwise."""
    return 1.5 + idle_ms(batch, depth)


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

    @property
    def num_prefill(self) -> int:
        return self.length


@dataclass
class Load:
    """``size`` sequences in flight, each followed by the next when it has its answer.

    Attributes:
        worth: seconds that plain decoding takes for ``tokens``, without noise. depths: levels of
            the tree of every cycle. prompt_ms: of a prompt. draft_ms: more where the draft follows
            it. followed: of the sequences so far.
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
    prompt_ms: float = 0.0
    draft_ms: float = 0.0
    followed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    worth: float = 0.0
    depths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.sequences: list[Sequence] = []
        for _ in range(self.size):
            self.sequences.append(self._new(first=True))
        self.waiting = 0
        self._ahead: Any = None

    def run(self, cycles: int) -> Load:
        for _ in range(cycles):
            self._step()
        return self

    def _new(self, *, first: bool = False) -> Sequence:
        left = self.chance.randint(1, self.answer) if first else self.answer
        sequence = Sequence(left, self.rate)
        sequence.drafting = self.plan.follows(sequence, self.sequences)
        self.followed += sequence.drafting
        self.seconds += (self.prompt_ms + self.draft_ms * sequence.drafting) / 1000
        self.worth += self.prompt_ms / 1000
        return sequence

    def _step(self) -> None:
        quiet = self.plan.wants_quiet and bool(self.sequences)
        disturbed = self.waiting > 0 and not quiet
        if disturbed:
            for _ in range(self.waiting):
                self.sequences.append(self._new())
            self.waiting = 0
        self._cycle(disturbed=disturbed)

    def _cycle(self, *, disturbed: bool, joining: int = 0, following: float = 0.0) -> None:
        tree = self._launched(self.plan.tree_for(self.sequences))
        if not any(s.drafting for s in self.sequences):
            tree = None
        depth = tree.steps if tree else 0
        self.depths.append(depth)
        switched = depth > 0 and len(self.depths) > 1 and self.depths[-2] == 0
        rows = sum(len(s.deferred) for s in self.sequences) if switched else 0
        seconds = (self._ms(depth) + rows * self.catch_up_ms) / 1000
        accepted = [self._accept(s, depth) if s.drafting else 0 for s in self.sequences]
        for s, count in zip(self.sequences, accepted, strict=True):
            s.left -= count + 1
            s.length += count + 1
            s.deferred = [] if tree or not s.drafting else [*s.deferred, None]
            self.tokens += count + 1
        self.seconds += seconds
        emitted = sum(accepted) + len(accepted)
        self.worth += emitted * self.cycle_ms(len(accepted), 0) / max(len(accepted), 1) / 1000
        self.plan.observe(
            Cycle(
                self.sequences,
                tree,
                [
                    count if tree and s.drafting else None
                    for s, count in zip(self.sequences, accepted, strict=True)
                ],
                rows,
                None if disturbed else seconds,
                joining,
                following,
            )
        )
        self.waiting += sum(s.left <= 0 for s in self.sequences)
        self.sequences = [s for s in self.sequences if s.left > 0]

    def _ms(self, depth: int) -> float:
        """Of the next cycle, with what disturbs it."""
        ms = self.cycle_ms(len(self.sequences), depth) * self.chance.lognormvariate(0, self.noise)
        if depth == 0 and self.depths[-2:-1] and self.depths[-2]:
            ms += TURN * self.cycle_ms(len(self.sequences), 0)
        if self.chance.random() < self.hiccups:
            ms *= 6  # a capture, or another program
        return ms

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


@dataclass
class PromptLoad(Load):
    """``size`` clients whose prompts are prefilled beside cycles, on a device that mixes: a plain
    step rides in the forward of prompts, a tree's cycle runs after it.

    ``worth`` counts neither: runs are to be compared with plain ones.

    Attributes:
        forward_ms: of a forward of prompts, besides what each prompt takes. at_once: of its prompts
            at most. riding: share of its time that a plain step takes which rides; None: what it
            takes more than a step of one sequence. burst: whether all come at once, as to a server
            that begins; else all decode at first.
    """

    forward_ms: float = 5.3  # an 8B on an H200: launches, and reading the weights
    at_once: int = 4
    riding: float | None = None
    burst: bool = False

    def _step(self) -> None:
        ready, behind_prompts = self.waiting, self._prefilled
        quiet = self.plan.wants_quiet and bool(self.sequences)
        count = 0 if quiet else min(ready, self.at_once)
        new = [self._new() for _ in range(count)]
        self.waiting -= count
        self._prefilled = count > 0
        self.seconds += self.forward_ms * self._prefilled / 1000
        if self.sequences:
            self.beside += count > 0
            following = self.draft_ms * sum(s.drafting for s in new) / 1000
            disturbed = count > 0 or behind_prompts
            self._cycle(disturbed=disturbed, joining=ready, following=following)
        self.sequences += new

    def _ms(self, depth: int) -> float:
        ms = super()._ms(depth)
        if depth or not self._prefilled:
            return ms
        alone = self.cycle_ms(len(self.sequences), 0)
        added = alone - self.cycle_ms(1, 0) if self.riding is None else self.riding * alone
        return ms - alone + max(added, LEAST_RIDE * alone)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.beside = 0  # cycles with prompts beside them
        self._prefilled = False  # whether prompts were, in the last step
        if self.burst:
            self.sequences, self.waiting = [], self.size
