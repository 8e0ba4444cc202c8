"""StepCost: the seconds of a step, by tree size and batch size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import pairwise

__all__ = ["StepCost", "load_bucket"]

LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper ends of the loads (running sequences) that share an overhead."""
_STEPS = 256.0
"""Steps that an overhead averages over."""
_PRIOR_STEPS = 8.0
"""Steps that the overhead of the nearest tree counts for, before a tree was served."""
_BESIDE_PROMPTS = 0.25
"""Weight of a step with prompts, or after one: a step is launched while the one before it runs, so
its seconds hold a part of that one's. Over many steps that evens out (recorded loads)."""
_OUTLIER = 4.0
"""Times the expected seconds that one step counts for at most: it was a capture or a pause."""


def load_bucket(num_running: int) -> int:
    """The upper end of the loads that ``num_running`` shares an overhead with."""
    return LOADS[min(bisect_left(LOADS, num_running), len(LOADS) - 1)]


class StepCost:
    """Seconds of a step = a table by tree size and batch size + an overhead of the present load.

    The table is measured at start (``prime``), over short contexts and an idle host. The overhead
    is a moving average of what steps took beyond it, prompts left out: context, host work, what
    runs beside. It is nearly the same for all trees, so what a tree costs more is the table's.
    """

    def __init__(self) -> None:
        self._table: dict[int, dict[int, float]] = {}  # by nodes, then batch size, both ascending
        self._prompt_row = 0.0  # seconds; 0: not measured
        self._unit = 0.0  # seconds of an autoregressive step of one sequence; 0: not known
        self._known_alone: dict[tuple[int, int], float] = {}  # what the table gave so far
        # mean and steps, by load and tree size
        self._overhead: dict[int, dict[int, tuple[float, float]]] = {}
        self._after_prompts = False

    @property
    def is_known(self) -> bool:
        """Whether seconds are known at all, measured at start or from a served step."""
        return bool(self._table) or self._unit > 0.0

    def prime(self, num_nodes: int, batch_size: int, seconds: float) -> None:
        """Enter what a step of ``num_nodes`` a sequence took before anything was served."""
        row = {**self._table.get(num_nodes, {}), batch_size: seconds}
        self._table[num_nodes] = dict(sorted(row.items()))
        self._table = dict(sorted(self._table.items()))
        self._known_alone.clear()

    def prime_prompts(self, num_rows: int, seconds: float) -> None:
        """Enter what a prefill of ``num_rows`` took before anything was served."""
        self._prompt_row = seconds / num_rows

    def seconds(self, num_nodes: int, batch_size: int, num_running: int) -> float:
        """Expected seconds of a step without prompts; relative ones before ``is_known``."""
        mean = self._mean(load_bucket(num_running), num_nodes)
        return max(self._alone(num_nodes, batch_size) + mean, 0.1 * self._alone(1, 1))

    def observe(
        self, num_nodes: int, batch_size: int, num_running: int, prompt_rows: int, seconds: float
    ) -> None:
        """Learn from a served step. Steps with prompts count where a prompt row's cost is known."""
        beside = prompt_rows > 0 or self._after_prompts
        self._after_prompts = prompt_rows > 0
        if beside and not self._prompt_row:
            return
        if not self.is_known:
            net = self.without_prompts(seconds, prompt_rows)
            self._unit = net / _usual(num_nodes, batch_size)
            self._known_alone.clear()
        expected = self.seconds(num_nodes, batch_size, num_running)
        most = _OUTLIER * (expected + self._prompt_row * prompt_rows)
        net = self.without_prompts(min(seconds, most), prompt_rows)
        load = load_bucket(num_running)
        known = self._overhead.setdefault(load, {})
        mean, steps = known.get(num_nodes, (self._mean(load, num_nodes), _PRIOR_STEPS))
        weight = _BESIDE_PROMPTS if beside else 1.0
        steps = min(steps + weight, _STEPS)
        overhead = net - self._alone(num_nodes, batch_size)
        known[num_nodes] = mean + (overhead - mean) * weight / steps, steps

    def without_prompts(self, seconds: float, prompt_rows: int) -> float:
        """``seconds`` of a step less what its prompt rows cost."""
        return seconds - self._prompt_row * prompt_rows

    def _mean(self, load: int, num_nodes: int) -> float:
        """The overhead of a tree at ``load``; until it was served that of the nearest size."""
        known = self._overhead.get(load)
        if not known:
            return 0.0
        return known[min(known, key=lambda size: abs(size - num_nodes))][0]

    def _alone(self, num_nodes: int, batch_size: int) -> float:
        """The table's seconds."""
        key = num_nodes, batch_size
        if key not in self._known_alone:
            self._known_alone[key] = self._interpolated(num_nodes, batch_size)
        return self._known_alone[key]

    def _interpolated(self, num_nodes: int, batch_size: int) -> float:
        if not self._table:
            return (self._unit or 1.0) * _usual(num_nodes, batch_size)
        at = {nodes: _on_line(row, batch_size) for nodes, row in self._table.items()}
        return _on_line(at, num_nodes)


def _usual(num_nodes: int, batch_size: int) -> float:
    """Seconds to those of an autoregressive step of one sequence, where nothing was measured.

    An 8B pair with a chain on an H200 is near it (docs/measurements.md).
    """
    drafting = 0.12 + 0.05 * (num_nodes - 1) ** 0.5 if num_nodes > 1 else 0.0
    return 1.0 + drafting + batch_size * (0.012 + 0.0065 * num_nodes)


def _on_line(points: Mapping[int, float], x: int) -> float:
    """Linear interpolation through ``points`` (ascending); the first value before them, the last
    slope beyond them where it rises.
    """
    known = list(points.items())
    if len(known) == 1 or x <= known[0][0]:
        return known[0][1]
    (x0, y0), (x1, y1) = next((pair for pair in pairwise(known) if pair[1][0] >= x), known[-2:])
    slope = (y1 - y0) / (x1 - x0)
    return y0 + slope * (x - x0) if x <= x1 else y1 + max(slope, 0.0) * (x - x1)
