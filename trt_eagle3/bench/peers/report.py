"""Results of bench --against: our side and the peer's for each load, as JSON and tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from trt_eagle3.bench.result import Side, differing_prompts
from trt_eagle3.bench.workload import Load
from trt_eagle3.io.terminal_text import TextTable
from trt_eagle3.prompts.kept import GENERIC_NOTE

__all__ = ["AgainstReport", "AgainstRow", "FirstTokenComparison"]


@dataclass(frozen=True)
class AgainstRow:
    """One load, with or without speculation.

    Attributes:
        speculation: whether our side drafts.
        peer_speculation: whether the peer drafts.
        num_prompts: different prompts of a round.
    """

    load: Load
    speculation: bool
    peer_speculation: bool
    ours: Side
    peer: Side
    num_prompts: int

    @property
    def ratio(self) -> float:
        """Tokens per second, ours over the peer's.

        The median over rounds, in which both sides run one after the other.
        """
        pairs = zip(self.ours.runs, self.peer.runs, strict=True)
        return median(a.tokens_per_second / b.tokens_per_second for a, b in pairs)

    @property
    def first_token_ratio(self) -> float | None:
        """Median time to the first token, the peer's over ours: above 1, ours is faster."""
        ours, peer = self.ours.first_token, self.peer.first_token
        return peer.p50 / ours.p50 if ours and peer else None

    @property
    def num_differing(self) -> int:
        """Number of prompts to which the two sides emitted different tokens in some round."""
        return len(differing_prompts(self.ours, self.peer, self.num_prompts))

    def line(self, peer: str) -> str:
        """Summarise the row in one line, ours before the peer's."""
        steps = [f"{side.step_ms or 0.0:.2f}" for side in (self.ours, self.peer)]
        speeds = [f"{side.tokens_per_second:.0f}" for side in (self.ours, self.peer)]
        return (
            f"{self.load.name} in flight, {_decoding(self.speculation)}, trt-eagle3 and {peer}: "
            f"{' and '.join(steps)} ms a step, {' and '.join(speeds)} tokens/s"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "concurrency": self.load.concurrency,
            "speculation": self.speculation,
            "peer_speculation": self.peer_speculation,
            "ratio": self.ratio,
            "first_token_ratio": self.first_token_ratio,
            "num_differing": self.num_differing,
            "ours": self.ours.to_dict(),
            "peer": self.peer.to_dict(),
        }


@dataclass(frozen=True)
class FirstTokenComparison:
    """The prompts of a file, one at a time, up to their first tokens."""

    file: str
    row: AgainstRow

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"file": self.file, **self.row.to_dict()}

    def cells(self, peer: str) -> list[list[str]]:
        """Return the cells of two table rows, ours and the peer's."""
        ratio, row = self.row.first_token_ratio, self.row
        return [
            [
                Path(self.file).name,
                "trt-eagle3",
                _decoding(row.speculation),
                str(row.ours.first_token or ""),
                f"{ratio:.2f}" if ratio else "",
            ],
            ["", peer, _decoding(row.peer_speculation), str(row.peer.first_token or ""), ""],
        ]


@dataclass(frozen=True)
class AgainstReport:
    """All loads; ``facts`` are what they have in common (bundle, peer, machine, prompts, ...).

    ``num_left_out``: skipped prompts with videos. ``first_tokens``: of prompts measured one by one.
    """

    facts: Mapping[str, Any]
    rows: tuple[AgainstRow, ...]
    num_left_out: int = 0
    first_tokens: tuple[FirstTokenComparison, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; ``docs/bench.md`` describes them."""
        facts = {**self.facts, "num_left_out": self.num_left_out}
        rows = [row.to_dict() for row in self.rows]
        return {**facts, "rows": rows, "first_tokens": [row.to_dict() for row in self.first_tokens]}

    def tables(self) -> list[TextTable]:
        """Return tables of speed, first tokens and steps by load, each within 60 columns.

        A load is a number of requests in flight. Ours is the upper row of each pair. A ratio above
        1: ours is faster.
        """
        left = "load", "engine", "decoding"
        speed = TextTable(*left, "tokens/s", "ratio", "acceptance\nlength")
        first = TextTable(*left, "first token ms,\np50 / 95 / 99", "ratio")
        steps = TextTable(*left, "step ms", "per token ms,\np50 / 95 / 99")
        for row in self.rows:
            early = row.first_token_ratio
            ratios = f"{row.ratio:.2f}", f"{early:.2f}" if early else ""
            sides = (
                ((row.load.name, "trt-eagle3"), row.ours, row.speculation, ratios),
                (("", self.facts["peer"]), row.peer, row.peer_speculation, ("", "")),
            )
            for names, side, drafted, (of_speed, of_first) in sides:
                left = *names, _decoding(drafted)
                length = side.acceptance_length if drafted else None
                tokens = f"{side.tokens_per_second:.0f}"
                speed.add_row(*left, tokens, of_speed, f"{length:.2f}" if length else "")
                first.add_row(*left, str(side.first_token or ""), of_first)
                step = f"{side.step_ms:.2f}" if side.step_ms else ""
                steps.add_row(*left, step, str(side.per_token or ""))
        return [speed, first, steps, *([self._first_tokens()] if self.first_tokens else [])]

    def _first_tokens(self) -> TextTable:
        """Return the table by file of prompts, one at a time."""
        table = TextTable(
            "prompts", "engine", "decoding", "first token ms,\np50 / 95 / 99", "ratio"
        )
        for found in self.first_tokens:
            for cells in found.cells(self.facts["peer"]):
                table.add_row(*cells)
        return table

    def lines(self) -> list[str]:
        """Return lines on what was measured, differing answers and skipped prompts."""
        f = self.facts
        lines = [
            f"{f['bundle']} against {f['peer']} {f['peer_version']} on {f['machine']}: "
            f"{f['backend']}, {f['dtype']}, {f['num_prompts']} prompts, medians of {f['rounds']} "
            "rounds; a ratio above 1: ours is faster"
        ]
        if f.get("prompts") == "generic":
            lines.append(GENERIC_NOTE)
        if self.num_left_out:
            lines.append(f"note: {self.num_left_out} prompts with videos are left out")
        for row in self.rows:
            if row.num_differing:
                lines.append(
                    f"note: {row.load.name} in flight, {_decoding(row.speculation)}: the tokens of "
                    f"{row.num_differing} of {row.num_prompts} prompts differ"
                )
        return lines


def _decoding(drafted: bool) -> str:
    return "speculative" if drafted else "plain"
