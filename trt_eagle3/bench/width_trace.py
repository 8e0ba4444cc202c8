"""What an adaptive plan did, cycle by cycle, beside what it reckoned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from trt_eagle3.decode.adaptive_plan import AdaptivePlan
from trt_eagle3.decode.decoder import AnyTree
from trt_eagle3.decode.plan import Cycle
from trt_eagle3.decode.sequence import SequenceState

__all__ = ["Ledger", "TracedCycle", "TracedPlan", "ledger", "trace_lines"]


@dataclass(frozen=True)
class TracedCycle:
    """One cycle.

    Attributes:
        draft_tokens: of each sequence; 0 of a plain cycle. tokens: that all sequences emitted.
        ms: since the cycle before; NaN where anything else came between. reckoned_ms: what the
            plan expected, without what the draft caught up with. caught_up: rows of that.
    """

    draft_tokens: int
    tokens: int
    ms: float
    reckoned_ms: float
    caught_up: int


class TracedPlan:
    """An ``AdaptivePlan`` whose cycles are written down."""

    speculates = True

    def __init__(self, plan: AdaptivePlan) -> None:
        self.cycles: list[TracedCycle] = []
        self._plan = plan

    @property
    def wants_quiet(self) -> bool:
        """As the plan's."""
        return self._plan.wants_quiet

    def tree_for(self, sequences: Sequence[SequenceState]) -> AnyTree | None:
        """As the plan's."""
        return self._plan.tree_for(sequences)

    def follows(self, sequence: SequenceState, others: Sequence[SequenceState]) -> bool:
        """As the plan's."""
        return self._plan.follows(sequence, others)

    def trees_at(self, batch_size: int) -> Sequence[AnyTree | None]:
        """As the plan's."""
        return self._plan.trees_at(batch_size)

    def prime(self, tree: AnyTree | None, batch_size: int, seconds: float) -> None:
        """As the plan's."""
        self._plan.prime(tree, batch_size, seconds)

    def prime_catch_up(self, num_rows: int, seconds: float) -> None:
        """As the plan's."""
        self._plan.prime_catch_up(num_rows, seconds)

    def observe(self, cycle: Cycle) -> None:
        """Write the cycle down, and hand it on."""
        self.cycles.append(
            TracedCycle(
                draft_tokens=cycle.tree.num_nodes - 1 if cycle.tree else 0,
                tokens=sum((n or 0) + 1 for n in cycle.accepted),
                ms=float("nan") if cycle.seconds is None else 1e3 * cycle.seconds,
                reckoned_ms=1e3 * self._plan.reckoned_seconds(cycle),
                caught_up=cycle.caught_up,
            )
        )
        self._plan.observe(cycle)


def trace_lines(cycles: Sequence[TracedCycle]) -> Iterator[str]:
    """A line for every run of cycles of one width."""
    start = 0
    for draft_tokens, run in groupby(cycles, key=lambda c: c.draft_tokens):
        found = list(run)
        name = f"{draft_tokens} drafted" if draft_tokens else "plain"
        times = " ".join(f"{c.ms:.1f}" for c in found[:8])
        rest = found[8:]
        if rest:
            ordered = sorted(c.ms for c in rest)
            times += f" ... median {median(ordered):.1f}, longest {ordered[-1]:.1f}"
        late = sum(c.caught_up for c in found)
        yield (
            f"{start:4d} +{len(found):<3d} {name}: {times} ms, reckoned "
            f"{found[0].reckoned_ms:.1f} to {found[-1].reckoned_ms:.1f}"
            + (f", {late} rows caught up" if late else "")
        )
        start += len(found)


@dataclass(frozen=True)
class Ledger:
    """Where an adaptive run lost time against plain decoding, or won it.

    All but ``plain_ms`` are shares of the time that plain decoding takes for the same tokens,
    negative where time was won; together they are all that was lost.

    Attributes:
        plain_ms: median of the plain cycles that had nothing else to do.
        plain: lost by those plain cycles. switching: by plain cycles next to a drafted one, which
            nothing was launched ahead of or behind. caught_up: by the cycles in which the draft
            caught up, beyond what such cycles take without. drafted: by drafted cycles, for what
            they emitted.
    """

    plain_ms: float
    plain: float
    switching: float
    caught_up: float
    drafted: float

    @property
    def total(self) -> float:
        """All that was lost."""
        return self.plain + self.switching + self.caught_up + self.drafted


def ledger(cycles: Sequence[TracedCycle], batch_size: int, usual_ms: float) -> Ledger:
    """Of ``cycles`` of ``batch_size`` sequences, beside plain ones of ``usual_ms`` in runs without
    speculation. Cycles that were not timed are left out.
    """
    lost = {"plain": 0.0, "switching": 0.0, "caught_up": 0.0, "drafted": 0.0}
    worth, alone = 0.0, list[float]()
    for i, cycle in enumerate(cycles):
        if math.isnan(cycle.ms):
            continue
        late = max(cycle.ms - cycle.reckoned_ms, 0.0) if cycle.caught_up else 0.0
        own = usual_ms * cycle.tokens / batch_size
        near = any(c.draft_tokens for c in (*cycles[max(i - 1, 0) : i], *cycles[i + 1 : i + 2]))
        kind = "drafted" if cycle.draft_tokens else "switching" if near else "plain"
        lost[kind] += cycle.ms - late - own
        lost["caught_up"] += late
        worth += own
        if kind == "plain" and not cycle.caught_up:
            alone.append(cycle.ms)
    plain_ms = median(alone) if alone else math.nan
    return Ledger(plain_ms=plain_ms, **{kind: ms / worth for kind, ms in lost.items()})
