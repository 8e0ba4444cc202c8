"""Results of load over HTTP: each side's speed and latencies by load, as JSON and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.chat_client import ClientReply
from trt_eagle3.bench.result import Percentiles
from trt_eagle3.bench.workload import Load
from trt_eagle3.io.terminal_text import TextTable

__all__ = ["LoadReport", "LoadRound", "LoadSide", "rows_of"]


@dataclass(frozen=True)
class LoadRound:
    """All requests of one round; ``seconds``: from the first request to the last token."""

    replies: tuple[ClientReply, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Served tokens per second, of all answers."""
        return sum(reply.num_tokens for reply in self.replies) / self.seconds


@dataclass(frozen=True)
class LoadSide:
    """One server, with one kind of request, under one load, by round."""

    rounds: tuple[LoadRound, ...]

    @property
    def answered(self) -> list[ClientReply]:
        """Replies that are answers."""
        return [r for found in self.rounds for r in found.replies if r.error is None]

    @property
    def errors(self) -> list[str]:
        """Errors in place of answers."""
        return [r.error for found in self.rounds for r in found.replies if r.error is not None]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the median round."""
        return median(found.tokens_per_second for found in self.rounds)

    @property
    def first_token(self) -> Percentiles | None:
        """Time from sending a request to the first piece of its answer."""
        return Percentiles.of_seconds([reply.first_seconds for reply in self.answered])

    @property
    def between(self) -> Percentiles | None:
        """Time between pieces: a step of the server, however many tokens it has."""
        return Percentiles.of_seconds([gap for reply in self.answered for gap in reply.gaps])

    @property
    def per_token(self) -> Percentiles | None:
        """Of each answer, the time after its first piece over its tokens after the first."""
        return Percentiles.of_seconds(
            [sum(r.gaps) / (r.num_tokens - 1) for r in self.answered if r.num_tokens > 1]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        times = {name: getattr(self, name) for name in ("first_token", "between", "per_token")}
        return {
            "tokens_per_second": self.tokens_per_second,
            "num_answers": len(self.answered),
            "num_errors": len(self.errors),
            **{f"{name}_ms": found and asdict(found) for name, found in times.items()},
        }


@dataclass(frozen=True)
class LoadReport:
    """All loads and sides; ratios are to the first side."""

    facts: Mapping[str, Any]
    rows: Mapping[Load, Mapping[str, LoadSide]]

    def ratio(self, load: Load, name: str) -> float:
        """Tokens per second over the first side's: the median over rounds, which alternate."""
        sides = self.rows[load]
        base = next(iter(sides.values()))
        pairs = zip(sides[name].rounds, base.rounds, strict=True)
        return median(a.tokens_per_second / max(b.tokens_per_second, 1e-9) for a, b in pairs)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        rows = [
            {
                "clients": load.concurrency if load.rate is None else None,
                "rate": load.rate,
                "side": name,
                "ratio": self.ratio(load, name),
                **side.to_dict(),
            }
            for load, sides in self.rows.items()
            for name, side in sides.items()
        ]
        return {**self.facts, "rows": rows}

    def tables(self) -> list[TextTable]:
        """Return tables of speed and latencies by load, each within 60 columns."""
        left = "clients" if next(iter(self.rows)).rate is None else "requests", "side"
        speed = TextTable(*left, "tokens/s", "ratio", "per token ms,\np50 / 95 / 99")
        latency = TextTable(
            *left, "first token ms,\np50 / 95 / 99", "between pieces ms,\np50 / 95 / 99"
        )
        for load, sides in self.rows.items():
            for i, (name, side) in enumerate(sides.items()):
                left = "" if i else load.name, name
                tokens, ratio = f"{side.tokens_per_second:.0f}", f"{self.ratio(load, name):.2f}"
                speed.add_row(*left, tokens, ratio, str(side.per_token or ""))
                latency.add_row(*left, str(side.first_token or ""), str(side.between or ""))
        return [speed, latency]

    def lines(self) -> list[str]:
        """Return the first error of each side, if any."""
        return [
            f"note: {load.name}, {name}: {len(side.errors)} requests failed, the first: "
            f"{side.errors[0]}"
            for load, sides in self.rows.items()
            for name, side in sides.items()
            if side.errors
        ]


def rows_of(
    found: Mapping[tuple[Load, str], Sequence[LoadRound]],
) -> dict[Load, dict[str, LoadSide]]:
    """Group rounds by load and side."""
    rows: dict[Load, dict[str, LoadSide]] = {}
    for (load, name), rounds in found.items():
        rows.setdefault(load, {})[name] = LoadSide(tuple(rounds))
    return rows
