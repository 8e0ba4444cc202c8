"""StepCost: seconds of a step by tree size and batch size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import pairwise

__all__ = ["StepCost", "load_bucket"]

LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper bounds of the load buckets (running sequences). Each bucket has one overhead per tree."""
_STEPS = 256.0
"""Steps in the moving average of an overhead."""
_PRIOR_STEPS = 8.0
"""Weight, in steps, of the nearest tree's overhead for a tree that was not served yet."""
_BESIDE_PROMPTS = 0.25
"""Weight of a step with prompts, or of the step after it. A step is launched while the previous
one runs, so its seconds contain part of the previous step. Over many steps this averages out."""
_OUTLIER = 4.0
"""A step counts for at most this many times its expected seconds. It bounds captures and pauses."""


def load_bucket(num_running: int) -> int:
    """Return the upper bound of the load bucket of ``num_running``."""
    return LOADS[min(bisect_left(LOADS, num_running), len(LOADS) - 1)]


class StepCost:
    """Seconds of a step = a table by tree size and batch size + an overhead by load.

    The table is measured at start (``prime``), with short contexts and an idle host. The overhead
    is a moving average of the seconds that served steps took beyond the table, without their
    prompts: context, host work, other work on the device. It is nearly the same for all trees, so
    the table gives the differences between trees.
    """

    def __init__(self) -> None:
        self._table: dict[int, dict[int, float]] = {}  # by nodes, then batch size, both ascending
        self._prompt_row = 0.0  # seconds; 0: not measured
        self._unit = 0.0  # seconds of an autoregressive step of one sequence; 0: not known
        self._known_alone: dict[tuple[int, int], float] = {}  # cache of table look-ups
        # mean and its steps, by load bucket and tree size
        self._overhead: dict[int, dict[int, tuple[float, float]]] = {}
        self._after_prompts = False

    @property
    def is_known(self) -> bool:
        """Whether a step was measured, at start or while serving."""
        return bool(self._table) or self._unit > 0.0

    @property
    def knows_prompts(self) -> bool:
        """Whether a prefill was measured."""
        return self._prompt_row > 0.0

    def prime(self, num_nodes: int, batch_size: int, seconds: float) -> None:
        """Add a step that was measured at start. ``num_nodes``: of each sequence's tree."""
        row = {**self._table.get(num_nodes, {}), batch_size: seconds}
        self._table[num_nodes] = dict(sorted(row.items()))
        self._table = dict(sorted(self._table.items()))
        self._known_alone.clear()

    def prime_prompts(self, num_rows: int, seconds: float) -> None:
        """Add a prefill of ``num_rows`` that was measured at start."""
        self._prompt_row = seconds / num_rows

    def seconds(self, num_nodes: int, batch_size: int, num_running: int) -> float:
        """Return the expected seconds of a step without prompts. Relative until ``is_known``."""
        mean = self._mean(load_bucket(num_running), num_nodes)
        return max(self._alone(num_nodes, batch_size) + mean, 0.1 * self._alone(1, 1))

    def observe(
        self, num_nodes: int, batch_size: int, num_running: int, prompt_rows: int, seconds: float
    ) -> None:
        """Add a served step. Steps with prompts count only if the cost of prompt rows is known."""
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
        """Return ``seconds`` of a step minus the cost of its prompt rows."""
        return seconds - self._prompt_row * prompt_rows

    def prompt_rows(self, seconds: float, num_nodes: int, batch_size: int, num_running: int) -> int:
        """Return how many prompt rows fit into ``seconds`` beside a step.

        rows = (seconds - seconds of the step) / seconds of a row
        """
        assert self.knows_prompts
        left = seconds - self.seconds(num_nodes, batch_size, num_running)
        return max(int(left / self._prompt_row), 0)

    def _mean(self, load: int, num_nodes: int) -> float:
        """Return a tree's overhead at ``load``; if it was not served there, the nearest size's."""
        known = self._overhead.get(load)
        if not known:
            return 0.0
        return known[min(known, key=lambda size: abs(size - num_nodes))][0]

    def _alone(self, num_nodes: int, batch_size: int) -> float:
        """Return seconds by the table."""
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
    """Estimate seconds relative to an autoregressive step of one sequence, without measurements.

    Fitted to an 8B pair with a chain on an H200 (docs/measurements.md).
    """
    drafting = 0.12 + 0.05 * (num_nodes - 1) ** 0.5 if num_nodes > 1 else 0.0
    return 1.0 + drafting + batch_size * (0.012 + 0.0065 * num_nodes)


def _on_line(points: Mapping[int, float], x: int) -> float:
    """Interpolate ``points`` (ascending) linearly.

    Before the first point its value holds. Beyond the last point the last slope continues, unless
    it is negative.
    """
    known = list(points.items())
    if len(known) == 1 or x <= known[0][0]:
        return known[0][1]
    (x0, y0), (x1, y1) = next((pair for pair in pairwise(known) if pair[1][0] >= x), known[-2:])
    slope = (y1 - y0) / (x1 - x0)
    return y0 + slope * (x - x0) if x <= x1 else y1 + max(slope, 0.0) * (x - x1)
