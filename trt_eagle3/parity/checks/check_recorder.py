"""CheckRecorder: the measurements of every check, and the first failure.

A check passes only if it compared something. ``Measurements`` enforces that for every check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from trt_eagle3.parity.checks.thresholds import (
    MOST_NATS,
    MOST_ROUNDING,
    P95,
    ROUNDING,
    WORST_ROW,
    Limit,
    Thresholds,
)
from trt_eagle3.parity.metrics import Compared, RowErrors, largest_by_row

if TYPE_CHECKING:
    from trt_eagle3.parity.checks.evidence import Evidence
    from trt_eagle3.parity.checks.mismatch import Mismatch
    from trt_eagle3.parity.checks.own_rounding import Own

__all__ = ["Check", "CheckRecorder", "Measurement", "Measurements", "Status"]

Status = Literal["passed", "failed", "skipped", "not_applicable"]
"""``skipped``: the bundle has the subject, but it was not compared. ``not_applicable``: it lacks
it.
"""

_NOTHING_FOUND = "nothing of its kind in these prompts"


def _lacks_nothing(_: Evidence) -> str:
    return ""


@dataclass(frozen=True)
class Check:
    """A check: a name, a tolerance, and the function that measures.

    Attributes:
        stage: the part of the engine that it checks.
        title: its subject, for the report.
        threshold: a name of ``THRESHOLDS``.
        function: reads the evidence and adds its measurements.
        needs_draft: not applicable to a bundle without a draft.
        needs_pytorch: skipped when two bundles are compared.
        lacks: returns why the check does not apply to a bundle; empty if it applies.
    """

    name: str
    stage: str
    title: str
    threshold: str
    function: Callable[[Evidence, Measurements], None]
    needs_draft: bool = False
    needs_pytorch: bool = True
    lacks: Callable[[Evidence], str] = _lacks_nothing


@dataclass(frozen=True)
class Measurement:
    """One value.

    Attributes:
        compared: number of rows, tokens, draws, fields or files of which this is the worst value.
        row: the worst row of the sequence, if there is one.
        bound: replaces the check's tolerance; None: use the check's tolerance.
    """

    check: str
    value: float
    compared: int
    case: str
    tensor: str
    row: int | None = None
    detail: str = ""
    bound: float | None = None


@dataclass
class Measurements:
    """The measurements of one check.

    Attributes:
        counts: counters over all prompts.
        mismatches: tokens that differ, for checks that compare tokens.
        tie_margin, drawn_tie: limits up to which a mismatch is a tie (``checks.mismatch``).
    """

    check: Check
    limit: Limit
    tie_margin: float = 0.0
    drawn_tie: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    mismatches: list[Mismatch] = field(default_factory=list)
    _taken: list[Measurement] = field(default_factory=list, init=False)
    _reason: str = field(default=_NOTHING_FOUND, init=False)
    _applicable: bool = field(default=True, init=False)

    def add(
        self,
        value: float,
        case: str,
        tensor: str,
        row: int | None = None,
        detail: str = "",
        *,
        compared: int,
    ) -> None:
        """Add one value, the worst of ``compared`` values.

        With ``compared=0`` only a failure is kept: an expected value is missing.
        """
        self._take(Measurement(self.check.name, float(value), compared, case, tensor, row, detail))

    def _take(self, m: Measurement) -> None:
        """Keep a measurement, unless it passes without having compared anything."""
        if m.compared > 0 or not self._holds(m):
            self._taken.append(m)

    def add_cosines(self, rows: RowErrors, own: Own | None = None) -> None:
        """Add the 5th percentile of the cosines ``rows``; ``own``: as in ``add_rows``.

        The angle may be ``ROUNDING`` times PyTorch's. 1 - cosine grows with the angle's square.
        """
        value, bound, detail = _quantile(rows.errors, 0.05), None, ""
        if own is not None and not (self.limit.holds(value) or self.limit.overridden):
            theirs = _quantile(own(rows), 0.05)
            lacks = min(ROUNDING**2 * (1 - theirs), MOST_ROUNDING**2 / 2) if theirs > -1 else 0.0
            bound = min(self.limit.value, 1 - lacks)
            detail = f"allowed {bound:.8g}: PyTorch in this type has {theirs:.8g}"
        row = rows.first + int(rows.errors.argmin())
        self._take_rows(rows, value, row, detail, bound)

    def add_rows(self, *found: RowErrors, own: Own | None = None) -> None:
        """Add one value per tensor: its worst row, or for a p95 metric the p95.

        For a p95 metric the worst row counts too, divided by ``WORST_ROW``: a p95 alone would allow
        any error in one row of twenty. Rows with open experts may have any error, so only the p95
        counts for them.
        Args:
            own: PyTorch's own errors in the engine's dtype. A tensor outside the tolerance may have
                ``ROUNDING`` times those errors, if the user set no tolerance and PyTorch does not
                overflow.
        """
        for rows in found:
            if not len(rows.errors):
                continue
            value, row = self._value(rows), rows.first + int(rows.errors.argmax())
            bound, detail = None, ""
            if own is not None and self._may_round(value):
                theirs = self._value(RowErrors(rows.case, rows.tensor, own(rows)))
                may = min(ROUNDING * theirs, self._most) if isfinite(theirs) else 0.0
                bound = max(self.limit.value, may)
                detail = f"allowed {bound:.3g}: PyTorch in this type errs by {theirs:.3g}"
            self._take_rows(rows, value, row, detail, bound)

    def _take_rows(
        self, rows: RowErrors, value: float, row: int, detail: str, bound: float | None
    ) -> None:
        name, compared = self.check.name, len(rows.errors)
        self._take(Measurement(name, value, compared, rows.case, rows.tensor, row, detail, bound))

    def _may_round(self, value: float) -> bool:
        """Return whether rounding may explain an error outside the tolerance."""
        return self.limit.value < value <= self._most and not self.limit.overridden

    @property
    def _most(self) -> float:
        return MOST_NATS if self.limit.name == "logprobs" else MOST_ROUNDING

    def _value(self, rows: RowErrors) -> float:
        by_p95 = self.limit.metric.endswith(P95)
        errors = rows.errors if rows.open is None else rows.errors[~rows.open]
        worst = float(errors.max()) / (WORST_ROW if by_p95 else 1) if len(errors) else 0.0
        return (
            max(worst, _quantile(rows.errors, 0.95)) if by_p95 or rows.open is not None else worst
        )

    def add_exact(self, *found: Compared) -> None:
        """Add the largest difference of each pair; infinite if the shapes differ."""
        for pair in found:
            if pair.actual.shape != pair.expected.shape:
                detail = f"expected shape {list(pair.expected.shape)}, "
                detail += f"got {list(pair.actual.shape)}"
                self.add(float("inf"), pair.case, pair.tensor, None, detail, compared=0)
            elif pair.actual.numel():
                self._add_largest(pair)

    def _add_largest(self, pair: Compared) -> None:
        by_row = largest_by_row(pair.actual, pair.expected)
        worst = int(by_row.argmax())
        wrong = int((by_row > self.limit.value).sum())
        detail = f"{wrong} of {len(by_row)} rows differ" if wrong else ""
        row = pair.first + worst
        self.add(float(by_row[worst]), pair.case, pair.tensor, row, detail, compared=len(by_row))

    def count(self, **numbers: int) -> None:
        """Add to the counters over all prompts (``tokens=32``)."""
        self.counts.update({what.replace("_", " "): n for what, n in numbers.items()})

    def skip(self, reason: str) -> None:
        """Set why there is no measurement although the bundle has the subject."""
        self._reason, self._applicable = reason, True

    def not_applicable(self, reason: str) -> None:
        """Set why the check does not apply to the bundle."""
        self._reason, self._applicable = reason, False

    @property
    def status(self) -> Status:
        """Passed only if something was compared."""
        if self.failures:
            return "failed"
        if self.compared:
            return "passed"
        return "skipped" if self._applicable else "not_applicable"

    @property
    def reason(self) -> str:
        """Why there is no measurement; empty if there is one."""
        return "" if self._taken else self._reason

    @property
    def taken(self) -> Sequence[Measurement]:
        """The measurements, in order."""
        return tuple(self._taken)

    @property
    def compared(self) -> int:
        """Number of values compared by all measurements."""
        return sum(m.compared for m in self._taken)

    @property
    def failures(self) -> list[Measurement]:
        """Measurements outside the tolerance, in order."""
        return [m for m in self._taken if not self._holds(m)]

    def _holds(self, m: Measurement) -> bool:
        own = self.limit if m.bound is None else replace(self.limit, value=m.bound)
        return own.holds(m.value)

    @property
    def worst(self) -> Measurement | None:
        """The worst measurement."""
        sign = 1 if self.limit.better == "low" else -1
        return max(self._taken, key=lambda m: sign * m.value, default=None)


class CheckRecorder(Mapping[str, Measurements]):
    """Measurements by check name, in the order of the registry."""

    def __init__(self, checks: Iterable[Check], thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        ties = thresholds["tie_margin"].value, thresholds["drawn_tie"].value
        self._found = {c.name: Measurements(c, thresholds[c.threshold], *ties) for c in checks}

    def __getitem__(self, check: str) -> Measurements:
        return self._found[check]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def first_failure(self) -> Measurement | None:
        """The first measurement outside its tolerance, in the order of checks."""
        return next((m for found in self.values() for m in found.failures), None)

    @property
    def mismatches(self) -> list[Mismatch]:
        """Tokens that differ, over all checks."""
        return [m for found in self.values() for m in found.mismatches]


def _quantile(values: Tensor, q: float) -> float:
    """A quantile without interpolation, so that infinity stays a value."""
    ordered = values.double().sort().values
    return float(ordered[min(len(ordered) - 1, int(q * len(ordered)))])
