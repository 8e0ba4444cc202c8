"""EngineMetrics: counters of a running engine."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

__all__ = ["OFF_REASONS", "EngineMetrics", "Histogram", "Meter", "OffReason", "stall_of"]

OffReason = Literal["does_not_pay", "never_drafted"]
"""Drafting was not expected to pay; or nothing was ever drafted: no draft, requests without
speculation, or costs that rule it out from the start.
"""

_log = logging.getLogger("trt_eagle3")

OFF_REASONS: tuple[OffReason, ...] = get_args(OffReason)
SLOW_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
FAST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
DRAFT_TOKENS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 11.0, 15.0, 23.0, 31.0, 63.0)
_MIN_CYCLES = 200  # cycles before an acceptance rate is checked; its standard error is below 0.036


@dataclass(frozen=True)
class Histogram:
    """Observations by size, as a Prometheus histogram.

    Attributes:
        bounds: upper bounds of the buckets; the last bucket has none.
        counts: observations in each bucket, not cumulative.
        total: sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)


@dataclass(frozen=True)
class EngineMetrics:
    """A snapshot of an engine's counters.

    Attributes:
        requests: finished requests by outcome: ``stop``, ``length``, ``cancelled``, ``rejected``
            (invalid request), ``error`` (engine failure).
        prompt_tokens, generated_tokens: of all requests so far.
        reused_tokens: prompt tokens that the prefix cache had.
        cycles: target forwards after the prompts', counted per sequence, with or without a draft.
        accepted, proposed: accepted and verified drafts, by position after the root.
        queue_seconds, first_token_seconds, token_seconds: time to admission, time to the first
            token, and time between tokens.
        running, waiting: current sequences. preempted: number of preemptions.
        kv_pages_used: pages that sequences hold. kv_pages_cached: pages that only the prefix cache
            holds.
        draft_tokens: drafted tokens per sequence in the last batch cycle; 0 without speculation.
        draft_tokens_per_cycle: the same for all batch cycles.
        step_seconds: of the current step so far; 0 while there is no work.
        prepare_seconds: since a text was last prepared; 0 if none waits.
        embedding_hits: images and videos whose embeddings were on the device. embedding_host_hits:
            those found in host memory. embedding_misses: runs of the vision tower.
        embedding_bytes, embedding_host_bytes: of kept embeddings, on the device and on the host.
        image_hits, image_misses: encoded images whose decoded form was kept, and those that were
            decoded. image_bytes: of kept decoded images.
    """

    requests: Mapping[str, int]
    prompt_tokens: int
    generated_tokens: int
    reused_tokens: int
    cycles: int
    accepted: tuple[int, ...]
    proposed: tuple[int, ...]
    queue_seconds: Histogram
    first_token_seconds: Histogram
    token_seconds: Histogram
    running: int
    waiting: int
    preempted: int
    kv_pages_used: int
    kv_pages_cached: int
    kv_pages_total: int
    draft_tokens: int
    draft_tokens_per_cycle: Histogram
    step_seconds: float
    prepare_seconds: float = 0.0
    embedding_hits: int = 0
    embedding_host_hits: int = 0
    embedding_misses: int = 0
    embedding_bytes: int = 0
    embedding_host_bytes: int = 0
    image_hits: int = 0
    image_misses: int = 0
    image_bytes: int = 0

    @property
    def speculation_on(self) -> bool:
        """Whether any sequence drafted in the last batch cycle."""
        return self.draft_tokens > 0

    @property
    def off_reason(self) -> OffReason | None:
        """Why the last cycle drafted nothing; None if it drafted, or before the first cycle."""
        if self.speculation_on or not self.draft_tokens_per_cycle.count:
            return None
        return "does_not_pay" if self.proposed else "never_drafted"

    @property
    def plain_cycles(self) -> int:
        """Batch cycles without speculation."""
        return self.draft_tokens_per_cycle.counts[0]

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens emitted per target forward that verified drafts, the bonus token included;
        None before the first one.
        """
        return 1 + sum(self.accepted) / self.proposed[0] if self.proposed else None

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Acceptance rate of drafts by position after the root."""
        return tuple(a / p for a, p in zip(self.accepted, self.proposed, strict=True))


def stall_of(step_seconds: float, prepare_seconds: float, max_step_s: float) -> str | None:
    """Describe an engine whose step or prompts take more than ``max_step_s``; else None."""
    if step_seconds > max_step_s:
        return f"the engine has finished no step for {step_seconds:.0f} s"
    if prepare_seconds > max_step_s:
        return f"the engine has prepared no prompt for {prepare_seconds:.0f} s"
    return None


@dataclass
class _Buckets:
    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def snapshot(self) -> Histogram:
        return Histogram(self.bounds, tuple(self.counts), self.total)


class Meter:
    """Counts requests, tokens and cycles of an engine; thread-safe."""

    def __init__(self, acceptance_floor: float) -> None:
        """Create a meter.

        ``acceptance_floor``: warn once if the acceptance rate of first drafted tokens is lower.
        """
        self._floor = acceptance_floor
        self._warned = False
        self._lock = threading.Lock()
        self._draft_tokens = 0
        self.restart()

    def restart(self) -> None:
        """Reset all counters."""
        with self._lock:
            self._requests = Counter[str]()
            self._prompt_tokens = self._generated_tokens = self._cycles = 0
            self._accepted: list[int] = []
            self._proposed: list[int] = []
            self._queue, self._first = _Buckets(SLOW_SECONDS), _Buckets(SLOW_SECONDS)
            self._token, self._drafted = _Buckets(FAST_SECONDS), _Buckets(DRAFT_TOKENS)

    def begun(self, prompt_tokens: int) -> None:
        """Count a prepared request."""
        with self._lock:
            self._prompt_tokens += prompt_tokens

    def first_token(self, queue_seconds: float, seconds: float) -> None:
        """Count the first token of a request."""
        with self._lock:
            self._queue.add(queue_seconds)
            self._first.add(seconds)
            self._generated_tokens += 1

    def cycle(self, num_accepted: int, tree_depth: int, num_tokens: int, seconds: float) -> None:
        """Count a cycle of one sequence.

        ``num_accepted`` of ``tree_depth`` tree levels were accepted. ``num_tokens`` were delivered,
        ``seconds`` after the previous ones.
        """
        with self._lock:
            self._cycles += 1
            self._generated_tokens += num_tokens
            if num_tokens:
                self._token.add(seconds / num_tokens, num_tokens)
            grown = max(tree_depth - len(self._proposed), 0)
            self._proposed += [0] * grown
            self._accepted += [0] * grown
            for position in range(tree_depth):
                self._proposed[position] += 1
                self._accepted[position] += position < num_accepted
            warning = self._watch()
        if warning:
            _log.warning(warning)

    def batch_cycle(self, draft_tokens: int) -> None:
        """Count a batch cycle. ``draft_tokens``: drafted tokens per sequence."""
        with self._lock:
            self._draft_tokens = draft_tokens
            self._drafted.add(draft_tokens)

    def finished(self, outcome: str) -> None:
        """Count a finished request."""
        with self._lock:
            self._requests[outcome] += 1

    def snapshot(
        self, step_seconds: float = 0.0, prepare_seconds: float = 0.0, **now: int
    ) -> EngineMetrics:
        """Return all counters. ``now``: current values that the caller provides."""
        with self._lock:
            return EngineMetrics(
                requests=dict(self._requests),
                prompt_tokens=self._prompt_tokens,
                generated_tokens=self._generated_tokens,
                cycles=self._cycles,
                accepted=tuple(self._accepted),
                proposed=tuple(self._proposed),
                queue_seconds=self._queue.snapshot(),
                first_token_seconds=self._first.snapshot(),
                token_seconds=self._token.snapshot(),
                draft_tokens=self._draft_tokens,
                draft_tokens_per_cycle=self._drafted.snapshot(),
                step_seconds=step_seconds,
                prepare_seconds=prepare_seconds,
                **now,
            )

    def _watch(self) -> str | None:
        """Return the warning of a low acceptance rate, once; otherwise None."""
        if self._warned or not self._proposed or self._proposed[0] < _MIN_CYCLES:
            return None
        rate = self._accepted[0] / self._proposed[0]
        if rate >= self._floor:
            return None
        self._warned = True
        return (
            f"the draft's first token was accepted in {rate:.0%} of {self._proposed[0]} cycles, "
            f"below speculation.acceptance_floor ({self._floor:.0%}). Check how the draft is read: "
            "trt-eagle3 probe BUNDLE"
        )
