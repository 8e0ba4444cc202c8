"""Check recorder: what every check has measured, counted or skipped, and what failed first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from trt_eagle3.parity.checks.thresholds import P95, WORST_ROW, Limit, Thresholds
from trt_eagle3.parity.metrics import Compared, RowErrors, largest_by_row

if TYPE_CHECKING:
    from trt_eagle3.parity.checks.evidence import Evidence
    from trt_eagle3.parity.checks.mismatch import Mismatch

__all__ = ["Check", "CheckRecorder", "Measurement", "Measurements"]


@dataclass(frozen=True)
class Check:
    """A check: a name, a tolerance, and the function that measures.

    Attributes:
        stage: the part of the engine that it looks at. title: what of it, in words.
        threshold: a name of ``THRESHOLDS``.
        function: reads the evidence and adds its measurements.
        needs_draft: skipped of a bundle without a draft. needs_pytorch: skipped where two bundles
            are compared.
    """

    name: str
    stage: str
    title: str
    threshold: str
    function: Callable[[Evidence, Measurements], None]
    needs_draft: bool = False
    needs_pytorch: bool = True


@dataclass(frozen=True)
class Measurement:
    """One value. ``row``: of the sequence, where one row is the worst."""

    check: str
    value: float
    case: str
    tensor: str
    row: int | None = None
    detail: str = ""


@dataclass
class Measurements:
    """What one check has found.

    Attributes:
        taken: in order. counts: what was counted over all prompts. skipped: why there are none.
        mismatches: tokens that differ, of the checks that compare tokens.
    """

    check: Check
    limit: Limit
    tie_margin: float = 0.0
    taken: list[Measurement] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    skipped: str = ""
    mismatches: list[Mismatch] = field(default_factory=list)

    def add(
        self, value: float, case: str, tensor: str, row: int | None = None, detail: str = ""
    ) -> None:
        """Add one value."""
        self.taken.append(Measurement(self.check.name, float(value), case, tensor, row, detail))

    def add_rows(self, *found: RowErrors) -> None:
        """Add one value of each tensor: its worst row, or of a p95 that or a share of the worst.

        A p95 alone would let one row of twenty be anything.
        """
        for rows in found:
            if not len(rows.errors):
                continue
            value = float(rows.errors.max())
            if self.limit.metric.endswith(P95):
                value = max(_quantile(rows.errors, 0.95), value / WORST_ROW)
            self.add(value, rows.case, rows.tensor, rows.first + int(rows.errors.argmax()))

    def add_exact(self, *found: Compared) -> None:
        """Add the largest difference of each pair; of another shape an infinite one."""
        for pair in found:
            if pair.actual.shape != pair.expected.shape:
                detail = f"expected shape {list(pair.expected.shape)}, "
                detail += f"got {list(pair.actual.shape)}"
                self.add(float("inf"), pair.case, pair.tensor, None, detail)
            elif pair.actual.numel():
                self._add_largest(pair)

    def _add_largest(self, pair: Compared) -> None:
        by_row = largest_by_row(pair.actual, pair.expected)
        worst = int(by_row.argmax())
        wrong = int((by_row > self.limit.value).sum())
        detail = f"{wrong} of {len(by_row)} rows differ" if wrong else ""
        self.add(float(by_row[worst]), pair.case, pair.tensor, pair.first + worst, detail)

    def count(self, **numbers: int) -> None:
        """Add to what is counted over all prompts (``tokens=32``)."""
        self.counts.update({what.replace("_", " "): n for what, n in numbers.items()})

    def skip(self, reason: str) -> None:
        """Say why there is no measurement."""
        self.skipped = reason

    @property
    def failures(self) -> list[Measurement]:
        """Those out of tolerance, in the order in which they were taken."""
        return [m for m in self.taken if not self.limit.holds(m.value)]

    @property
    def worst(self) -> Measurement | None:
        """The one furthest on the wrong side."""
        sign = 1 if self.limit.better == "low" else -1
        return max(self.taken, key=lambda m: sign * m.value, default=None)


class CheckRecorder(Mapping[str, Measurements]):
    """The measurements of every check by its name, in the order of the registry."""

    def __init__(self, checks: Iterable[Check], thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        tie_margin = thresholds["tie_margin"].value
        self._found = {c.name: Measurements(c, thresholds[c.threshold], tie_margin) for c in checks}

    def __getitem__(self, check: str) -> Measurements:
        return self._found[check]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def first_failure(self) -> Measurement | None:
        """What left its tolerance first, in the order of checks and of their measurements."""
        return next((m for found in self.values() for m in found.failures), None)

    @property
    def mismatches(self) -> list[Mismatch]:
        """Tokens that differ, of all checks."""
        return [m for found in self.values() for m in found.mismatches]


def _quantile(values: Tensor, q: float) -> float:
    """Infinity counts as a value, not as an undefined one."""
    ordered = values.double().sort().values
    return float(ordered[min(len(ordered) - 1, int(q * len(ordered)))])
