"""What a cycle costs: seconds by tree, batch size and context, learnt from the cycles that were
served.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise

from trt_eagle3.decode.tuning import TuningTable
from trt_eagle3.spec import SparseMoe, TargetSpec

__all__ = [
    "BATCHES",
    "CostPrior",
    "CycleCosts",
    "ExpertReads",
    "Shape",
    "batch_bucket",
    "expert_reads",
    "on_line",
    "prior_of",
]

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Upper ends of the batch sizes that share a measured cost."""
_ENOUGH = 3  # samples after which a cost needs no other's help
_SAMPLES = 16  # the newest that count
_OUTLIER = 4.0  # times what is known: a capture or a compilation, unless it comes again and again
_REACH = 2.5  # how fast what one cost says of another falls with their distance
_HEAD_ROOM = 1e-9
_NEAR = 1.0  # distance of a batch of twice the size, or half
_LASTS = 1000  # timed cycles after which a cost is no longer known: loads and machines change
_KNOWN_DOUBT = 1.02  # times that a cost may be less
_DOUBT = (1.5, 1.35, 1.15)  # the same of one that has so few samples
_AGREES = 1.3
"""Times that served cycles may be dearer than they were primed, or cheaper, before what was primed
and never served is doubted. Of an 8B they take what they took alone, within 10 %. But a host that
also prepares prompts and sends answers made chains 2.9 times and plain cycles 1.9 times as dear
(tiny pair, H200, 2026-11-26): then one says little of the other."""


def batch_bucket(batch_size: int) -> int:
    """The upper end of the batch sizes that ``batch_size`` shares costs with."""
    return BATCHES[min(bisect_left(BATCHES, batch_size), len(BATCHES) - 1)]


@dataclass(frozen=True)
class Shape:
    """A cycle as far as its time depends on it.

    Attributes:
        num_nodes: of each tree, the root included; 1 is plain decoding. steps: its levels.
        context: mean rows of a sequence before the cycle.
    """

    num_nodes: int
    steps: int
    batch_size: int
    context: float

    @property
    def cell(self) -> tuple[int, int, int]:
        """Tree size, bucket of the batch and bucket of the context: what shares one cost."""
        long = max(0, math.floor(math.log2(max(self.context, 1.0) / 1024)) + 1)
        return self.num_nodes, batch_bucket(self.batch_size), long


@dataclass(frozen=True)
class CostPrior:
    """What a cycle costs before one was timed, in any unit: only ratios count.

    Attributes:
        base: cost of ``num_nodes``, ``steps`` and ``batch_size`` over short contexts.
        kv_share: bytes of a token in the KV cache over those of the weights; longer contexts add
            so much of what one plain token costs.
        measured: whether ``base`` was, on a machine.
    """

    base: Callable[[int, int, int], float]
    kv_share: float
    measured: bool = False

    def __call__(self, shape: Shape) -> float:
        read = self.base(1, 0, 1) * self.kv_share * shape.batch_size * shape.context
        return self.base(shape.num_nodes, shape.steps, shape.batch_size) + read


@dataclass
class _Cell:
    """Costs of one kind of cycle over their prior, and when the last one was seen; a prior that was
    measured counts as some of them.
    """

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    strange: list[float] = field(default_factory=list)
    typical: float = 1.0
    seen: int = 0
    trusts_prior: bool = False

    def __post_init__(self) -> None:
        self.ratios.extend([1.0] * (_ENOUGH if self.trusts_prior else 0))

    def add(self, ratio: float, now: int) -> None:
        """Count one; what is far off counts only when it comes thrice in a row."""
        self.seen = now
        if len(self.ratios) >= _ENOUGH and ratio > _OUTLIER * self.typical:
            self.strange.append(ratio)
            if len(self.strange) < _ENOUGH:
                return
            self.ratios.clear()
            self.ratios.extend(self.strange)
        else:
            self.ratios.append(ratio)
        self.strange.clear()
        ordered = sorted(self.ratios)
        # of few, some may be captures: these are slow, and nothing is fast by accident
        sure = len(ordered) >= 8 or self.trusts_prior
        self.typical = ordered[len(ordered) // (2 if sure else 4)]


class CycleCosts:
    """Running medians of cycle times; where a cycle has not been timed, those most like it say
    how far the prior is off.
    """

    def __init__(self, prior: CostPrior) -> None:
        self._prior = prior
        self._primed: dict[int, dict[int, float]] = {}  # seconds by batch and tree size
        self._cells: dict[tuple[int, int, int], _Cell] = {}
        self._ratios: dict[tuple[int, int, int], float] = {}  # reckoned since a cell has changed
        self._one_seconds: float | None = None  # likewise
        self._now = 0

    def prime(self, num_nodes: int, batch_size: int, seconds: float) -> None:
        """Take what a cycle over short contexts was measured to take for the prior; what was
        observed before is forgotten.
        """
        self._primed.setdefault(batch_size, {})[num_nodes] = seconds
        self._prior = CostPrior(_between(self._primed), self._prior.kv_share, measured=True)
        self._cells.clear()
        self._reckon_anew()

    def observe(self, shape: Shape, seconds: float) -> None:
        """Count a cycle that nothing else disturbed."""
        key = shape.cell
        if key not in self._cells:
            self._cells[key] = _Cell(trusts_prior=bool(self._primed) and self._agrees(key))
        self._now += 1
        self._cells[key].add(seconds / self._prior(shape), self._now)
        self._forget()
        self._reckon_anew()

    def seconds(self, shape: Shape) -> float:
        """What a cycle of ``shape`` is expected to take; 1 where nothing was ever timed."""
        if not self._cells:
            return self._prior(shape)
        return self._prior(shape) * self._ratio(shape.cell)

    @property
    def one_seconds(self) -> float:
        """Time of a plain cycle of one sequence over a short context."""
        if self._one_seconds is None:
            self._one_seconds = self.seconds(Shape(1, 0, 1, 0.0))
        return self._one_seconds

    @property
    def is_timed(self) -> bool:
        """Whether any cycle was timed: before that, ``seconds`` are in the prior's unit."""
        return bool(self._cells or self._primed)

    @property
    def is_measured(self) -> bool:
        """Whether costs were, here or by ``bench --tune``; else they are reckoned."""
        return self.is_timed or self._prior.measured

    def is_known(self, shape: Shape) -> bool:
        """Whether cycles like it were timed, or some were before anything was served. That counts
        where served cycles take what they were primed to, or the same tree was served to a batch of
        about that size.
        """
        key = shape.cell
        if self._is_served(key) or not self._primed:
            return self._is_served(key) or self._prior.measured
        near = (n for n in self._cells if n[0] == key[0] and _distance(n, key) <= _NEAR)
        return self._agrees(key) or any(map(self._is_served, near))

    def doubt(self, shape: Shape) -> float:
        """How many times cheaper a cycle may be than is known: the more, the longer ago one like it
        was timed.
        """
        cell = self._cells.get(shape.cell)
        if self.is_known(shape):
            return _KNOWN_DOUBT + min((self._now - (cell.seen if cell else 0)) / 8000, 0.1)
        return _DOUBT[len(cell.ratios) if cell else 0]

    def _reckon_anew(self) -> None:
        self._ratios.clear()
        self._one_seconds = None

    def _forget(self) -> None:
        """Drop what was not timed for long."""
        oldest = self._now - _LASTS
        for key in [key for key, cell in self._cells.items() if cell.seen <= oldest]:
            del self._cells[key]

    def _is_served(self, key: tuple[int, int, int]) -> bool:
        """Whether enough was of the cell at ``key``."""
        cell = self._cells.get(key)
        return cell is not None and len(cell.ratios) >= _ENOUGH

    def _agrees(self, wanted: tuple[int, int, int]) -> bool:
        """Whether served cycles like ``wanted`` take as long as they were primed to."""
        return not self._cells or 1 / _AGREES <= self._ratio(wanted) <= _AGREES

    def _ratio(self, wanted: tuple[int, int, int]) -> float:
        """Of a cost to its prior."""
        if wanted not in self._ratios:
            self._ratios[wanted] = self._reckoned_ratio(wanted)
        return self._ratios[wanted]

    def _reckoned_ratio(self, wanted: tuple[int, int, int]) -> float:
        own = self._cells.get(wanted)
        if own is not None and len(own.ratios) >= _ENOUGH:
            return own.typical
        total = weights = 0.0
        for key, cell in self._cells.items():
            weight = len(cell.ratios) * math.exp(-_REACH * _distance(key, wanted)) + _HEAD_ROOM
            total += weight * math.log(cell.typical)
            weights += weight
        return math.exp(total / weights)


def _distance(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    (nodes_a, batch_a, long_a), (nodes_b, batch_b, long_b) = one, other
    drafting = 0.5 if (nodes_a == 1) != (nodes_b == 1) else 0.0
    apart = abs(math.log2(nodes_a / nodes_b)) + abs(math.log2(batch_a / batch_b))
    return apart + 0.5 * abs(long_a - long_b) + drafting


@dataclass(frozen=True)
class ExpertReads:
    """What a forward of a mixture of experts reads of the target's weights, by its rows.

    Attributes:
        share: of the weights' bytes that are experts'. touched: of the experts, by one row.
    """

    share: float
    touched: float

    def times_one_row(self, rows: int) -> float:
        """Bytes that ``rows`` read over those that one reads, each expert as probable as another:
        what is reckoned until cycles are measured.
        """
        return self.read(rows) / self.read(1)

    def read(self, rows: int) -> float:
        """Of all weights' bytes."""
        return 1.0 - self.share * (1.0 - self.touched) ** rows


def expert_reads(spec: TargetSpec) -> ExpertReads | None:
    """Of ``spec``; None where it is no mixture."""
    mixtures = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, SparseMoe)]
    if not mixtures:
        return None
    hidden = spec.hidden_size
    layers = sum(x.mixer.num_values(hidden) + x.mlp.num_values(hidden) for x in spec.layers)
    routed = sum(3 * hidden * m.num_experts * m.expert_width for m in mixtures)
    share = routed / (layers + hidden * spec.vocab_size)
    return ExpertReads(share, mixtures[0].top_k / mixtures[0].num_experts)


def prior_of(
    table: TuningTable | None, kv_share: float, experts: ExpertReads | None = None
) -> CostPrior:
    """The costs that ``bench --tune`` has measured, or such as GPUs have.

    Args:
        kv_share: bytes of a token in the KV cache over those of the weights. experts: of a
            mixture's target, whose rows cost more until all experts are read.
    """
    if table is None:
        if experts is None:
            return CostPrior(_usual, kv_share)
        return CostPrior(partial(_of_mixture, experts), kv_share / experts.read(1))
    measured = _between({e.batch_size: e.cycle_ms for e in table.entries})
    return CostPrior(measured, kv_share, measured=True)


def _usual(num_nodes: int, steps: int, batch_size: int) -> float:
    """Relative to one plain token: an 8B pair on an H200 is near it (docs/measurements.md)."""
    rows = batch_size * (0.012 + 0.0065 * num_nodes)
    drafting = 0.07 + 0.06 * steps if steps else 0.0  # it is extended by what was accepted, too
    return 1.0 + drafting + rows


def _of_mixture(experts: ExpertReads, num_nodes: int, steps: int, batch_size: int) -> float:
    """As ``_usual``. A plain token reads little, so that a draft's steps weigh more."""
    read = experts.times_one_row(batch_size * num_nodes) - 1.0
    return _usual(num_nodes, 2 * steps, batch_size) + read


def _between(known: Mapping[int, Mapping[int, float]]) -> Callable[[int, int, int], float]:
    """Costs by batch size and tree size, between those that are known on straight lines."""
    by_batch = {size: dict(sorted(found.items())) for size, found in sorted(known.items())}

    @lru_cache(maxsize=4096)
    def cost(num_nodes: int, _steps: int, batch_size: int) -> float:
        at = {size: on_line(found, num_nodes) for size, found in by_batch.items()}
        return on_line(at, batch_size)

    return cost


def on_line(points: Mapping[int, float], x: int) -> float:
    """The value at ``x`` of straight lines through ``points``, in ascending order; beyond the
    last by the last line, if it rises; before the first the first.
    """
    known = list(points.items())
    if len(known) == 1 or x <= known[0][0]:
        return known[0][1]
    (x0, y0), (x1, y1) = next((pair for pair in pairwise(known) if pair[1][0] >= x), known[-2:])
    slope = (y1 - y0) / (x1 - x0)
    return y0 + slope * (x - x0) if x <= x1 else y1 + max(slope, 0.0) * (x - x1)
