"""Results of a bench: autoregressive against speculative decoding, as JSON, tables and a plot."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trt_eagle3.bench import PLOT_FORMATS
from trt_eagle3.bench.workload import Load, Run
from trt_eagle3.errors import UserError
from trt_eagle3.io.terminal_text import TextTable
from trt_eagle3.prompts.kept import GENERIC_NOTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "BenchReport",
    "Percentiles",
    "BenchRow",
    "Side",
    "check_plot",
    "differing_prompts",
]


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of a time, in milliseconds."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of_seconds(cls, values: Sequence[float] | np.ndarray[Any, Any]) -> Percentiles | None:
        """Return the percentiles of ``values``; None if there are no values."""
        return (
            cls(*(1000 * float(p) for p in np.percentile(values, (50, 95, 99))))
            if len(values)
            else None
        )

    def __str__(self) -> str:
        return " / ".join(
            f"{value:.3g}" if value < 1000 else f"{value:.0f}"
            for value in (self.p50, self.p95, self.p99)
        )


@dataclass(frozen=True)
class Side:
    """One way of decoding under one load, by round."""

    runs: tuple[Run, ...]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all answers; of the median round."""
        return median(run.tokens_per_second for run in self.runs)

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens of a drafting cycle, bonus token included; None without such cycles."""
        cycles = sum(run.cycles for run in self.runs)
        return 1 + sum(sum(run.accepted) for run in self.runs) / cycles if cycles else None

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """The share of those cycles that accepted each position."""
        cycles = sum(run.cycles for run in self.runs)
        deepest = max(len(run.accepted) for run in self.runs) if cycles else 0
        return tuple(
            sum(run.accepted[d] for run in self.runs if d < len(run.accepted)) / cycles
            for d in range(deepest)
        )

    @property
    def first_token(self) -> Percentiles | None:
        """Time from the arrival of a request to its first token."""
        return Percentiles.of_seconds(
            [r.first_token_seconds for run in self.runs for r in run.replies]
        )

    @property
    def per_token(self) -> Percentiles | None:
        """Time between tokens: the time of a step is shared by the tokens that it emitted."""
        passes = np.array([p for run in self.runs for r in run.replies for p in r.passes]).reshape(
            -1, 2
        )
        return Percentiles.of_seconds(
            np.repeat(passes[:, 0] / passes[:, 1], passes[:, 1].astype(int))
        )

    @property
    def step_ms(self) -> float | None:
        """Median milliseconds of a step in the second halves of the answers.

        If as many requests arrive as are in flight, all of them decode then.
        """
        late = [
            seconds
            for run in self.runs
            for reply in run.replies
            for seconds, _ in reply.passes[len(reply.passes) // 2 :]
        ]
        return 1e3 * median(late) if late else None

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        first, between = self.first_token, self.per_token
        return {
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_by_round": [run.tokens_per_second for run in self.runs],
            "acceptance_length": self.acceptance_length,
            "acceptance_by_position": list(self.acceptance_by_position),
            "first_token_ms": first and dataclasses.asdict(first),
            "per_token_ms": between and dataclasses.asdict(between),
            "step_ms": self.step_ms,
        }


def differing_prompts(one: Side, other: Side, num_prompts: int) -> dict[int, int]:
    """Map each differing prompt to the first token at which a round's two answers differ."""
    found: dict[int, int] = {}
    for a, b in zip(one.runs, other.runs, strict=True):
        for index, (left, right) in enumerate(zip(a.replies, b.replies, strict=True)):
            if left.token_ids != right.token_ids:
                pairs = zip_longest(left.token_ids, right.token_ids)
                first = next(i for i, (x, y) in enumerate(pairs) if x != y)
                prompt = index % num_prompts
                found[prompt] = min(first, found.get(prompt, first))
    return found


@dataclass(frozen=True)
class BenchRow:
    """One load.

    Attributes:
        speculative: None if the bundle has no draft.
        num_differing: prompts whose tokens differ with and without speculation.
    """

    load: Load
    plain: Side
    speculative: Side | None
    num_differing: int

    @property
    def ratio(self) -> float | None:
        """Tokens per second, with speculation over without.

        The median over rounds, in which both sides run one after the other. None where nothing was
        drafted.
        """
        return median(self.ratio_by_round) if self.ratio_by_round else None

    @property
    def ratio_by_round(self) -> tuple[float, ...]:
        """The ratio of each round; empty where nothing was drafted."""
        if self.speculative is None or self.speculative.acceptance_length is None:
            return ()
        pairs = zip(self.plain.runs, self.speculative.runs, strict=True)
        return tuple(b.tokens_per_second / a.tokens_per_second for a, b in pairs)

    @property
    def difference(self) -> Literal["faster", "slower", "none"] | None:
        """Speculative to plain: none if the rounds disagree; None if nothing was drafted."""
        ratios = self.ratio_by_round
        if not ratios:
            return None
        if min(ratios) <= 1 <= max(ratios):
            return "none"
        return "faster" if min(ratios) > 1 else "slower"

    @property
    def comparison(self) -> str | None:
        """Return one line: the ratio and its spread; None in a bundle without a draft."""
        if self.speculative is None:
            return None
        if self.ratio is None:
            return (
                f"{self.load.name} in flight: nothing was drafted, so there is nothing to compare; "
                "drafting was not expected to pay"
            )
        ratios = self.ratio_by_round
        spread = f"the spread of {len(ratios)} rounds: {min(ratios):.2f} to {max(ratios):.2f}"
        if self.difference == "none":
            return f"{self.load.name} in flight: no difference: 1.00 is within {spread}"
        known = spread if len(ratios) > 1 else "one round: the spread is not known"
        found = f"speculative is {self.difference}, x {self.ratio:.2f} ({known})"
        return f"{self.load.name} in flight: {found}"


@dataclass(frozen=True)
class BenchReport:
    """All loads; ``facts`` are what they have in common (bundle, machine, prompts, ...)."""

    facts: Mapping[str, Any]
    rows: tuple[BenchRow, ...]

    def growth(self, row: BenchRow, side: Side) -> float:
        """Return tokens per second over the first load's with the same decoding.

        The median over rounds.
        """
        base = self.rows[0].plain if side is row.plain else self.rows[0].speculative
        assert base is not None
        return median(
            b.tokens_per_second / a.tokens_per_second
            for a, b in zip(base.runs, side.runs, strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; ``docs/bench.md`` describes them."""
        rows = [
            {
                "concurrency": row.load.concurrency if row.load.rate is None else None,
                "rate": row.load.rate,
                "ratio": row.ratio,
                "ratio_by_round": list(row.ratio_by_round),
                "difference": row.difference,
                "num_differing": row.num_differing,
                **{
                    name: {**side.to_dict(), "growth": self.growth(row, side)}
                    for name, side in _sides(row)
                },
            }
            for row in self.rows
        ]
        return {**self.facts, "rows": rows}

    def tables(self) -> list[TextTable]:
        """Return tables of speed, latencies and, after drafting, acceptance by position.

        Each is within 80 columns.
        """
        first = self.rows[0].load
        load = "in flight" if first.rate is None else "requests"
        speed = TextTable(
            load, "decoding", "to plain", f"to {first.name}", "acceptance length", "tokens/s"
        )
        latency = TextTable(
            load, "decoding", "first token ms,\np50 / 95 / 99", "per token ms,\np50 / 95 / 99"
        )
        for row in self.rows:
            for name, side in _sides(row):
                ratio = "1.00" if side is row.plain else _ratio_text(row)
                length = side.acceptance_length
                speed.add_row(
                    row.load.name,
                    name,
                    ratio,
                    f"{self.growth(row, side):.2f}",
                    f"{length:.2f}" if length else "off" if side is not row.plain else "",
                    f"{side.tokens_per_second:.0f}",
                )
                latency.add_row(
                    row.load.name, name, str(side.first_token), str(side.per_token or "")
                )
        return [speed, latency, *self._acceptance()]

    def lines(self) -> list[str]:
        """Return lines on what was measured: each load's comparison, and how many answers differ
        through rounding.
        """
        f = self.facts
        measured = "1 round" if f["rounds"] == 1 else f"medians of {f['rounds']} rounds"
        lines = [
            f"{f['bundle']} on {f['machine']}: {f['backend']}, {f['dtype']}, {f['num_prompts']} "
            f"prompts, {measured}"
        ]
        lines += [GENERIC_NOTE] if f.get("prompts") == "generic" else []
        lines += [row.comparison for row in self.rows if row.comparison]
        for row in self.rows:
            if row.num_differing:
                lines.append(
                    f"note: {row.load.name} in flight: plain and speculative tokens differ for "
                    f"{row.num_differing} of {f['num_prompts']} prompts, through rounding in "
                    f"{f['dtype']}. Check for ties: trt-eagle3 validate {f['bundle']}"
                )
        return lines

    def _acceptance(self) -> list[TextTable]:
        drafted = [
            (row.load.name, row.speculative.acceptance_by_position)
            for row in self.rows
            if row.speculative
        ]
        if not any(rates for _, rates in drafted):
            return []
        table = TextTable("accepted at\nposition", *(name for name, _ in drafted))
        for position, of_loads in enumerate(zip_longest(*(rates for _, rates in drafted))):
            shown = ("" if rate is None else f"{100 * rate:.0f} %" for rate in of_loads)
            table.add_row(str(position + 1), *shown)
        return [table]

    def plot(self, file: Path) -> None:
        """Plot tokens per second by load, and acceptance by position.

        Raises:
            UserError: the format is not supported, or ``file`` cannot be written.
        """
        check_plot(file)
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.6), layout="constrained")
        speed, acceptance = figure.subplots(1, 2)
        self._plot_speed(speed)
        self._plot_acceptance(acceptance)
        figure.suptitle(f"{self.facts['bundle']} on {self.facts['machine']}", fontsize=9)
        try:
            figure.savefig(file, dpi=150)
        except OSError as error:
            raise UserError(f"{file}: cannot write the plot: {error.strerror or error}") from error

    def _plot_speed(self, axes: Axes) -> None:
        names = [row.load.name for row in self.rows]
        axes.plot(
            names, [row.plain.tokens_per_second for row in self.rows], marker="o", label="plain"
        )
        drafting = [(row, row.speculative) for row in self.rows if row.speculative]
        if drafting:
            rates = [side.tokens_per_second for _, side in drafting]
            axes.plot(names, rates, marker="o", label="speculative")
            for (row, _), rate in zip(drafting, rates, strict=True):
                note = _ratio_text(row)
                axes.annotate(
                    note,
                    (row.load.name, rate),
                    xytext=(0, 6),
                    textcoords="offset points",
                    ha="center",
                )
        axes.set(
            xlabel="requests in flight" if self.rows[0].load.rate is None else "requests",
            ylabel="tokens/s",
        )
        axes.set_ylim(bottom=0)
        axes.margins(y=0.15)
        axes.legend()

    def _plot_acceptance(self, axes: Axes) -> None:
        for row in self.rows:
            rates = row.speculative.acceptance_by_position if row.speculative else ()
            if rates:
                axes.plot(range(1, len(rates) + 1), rates, marker="o", label=row.load.name)
        axes.set(xlabel="position", ylabel="accepted", ylim=(0, 1.05))
        axes.locator_params(axis="x", integer=True)
        if axes.lines:
            axes.legend()


def _ratio_text(row: BenchRow) -> str:
    """Return the ratio, ``same`` within the spread, or ``-`` where nothing was drafted."""
    if row.ratio is None:
        return "-"
    return "same" if row.difference == "none" else f"{row.ratio:.2f}"


def check_plot(file: Path) -> None:
    """Reject a plot file with an unsupported format or a missing folder."""
    if file.suffix.lower() not in PLOT_FORMATS:
        raise UserError(f"--plot {file}: expected a name that ends in {', '.join(PLOT_FORMATS)}")
    if not file.parent.is_dir():
        raise UserError(f"--plot {file}: no folder {file.parent}. Create it first.")


def _sides(row: BenchRow) -> list[tuple[str, Side]]:
    return [("plain", row.plain), *([("speculative", row.speculative)] if row.speculative else [])]
