"""Write docs/measurements.md: ``python -m benchmarks.render_measurements``.

A file of ``benchmarks/results/<machine>/`` has the tables of one measurement and its conditions.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Literal

import click
from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["FILE", "RESULTS", "Result", "Table", "page", "read_results"]

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "measurements.md"
RESULTS = ROOT / "benchmarks" / "results"

Value = int | Decimal | str
Cell = Value | tuple[Value, Value] | None
"""A figure with its digits as written, a text, a pair (ours, theirs), or None for an empty cell."""

SECTIONS = {
    "vLLM 0.33.0 beside ours": "Is this project faster than vLLM, and where is it slower?",
    "Speculation policy": "What does the policy gain with a good draft, and lose with a bad one?",
    "Grammars": "What does structured output cost, and why llguidance?",
    "Big pairs on one H200": "How far is a decode step from the time to read its bytes?",
    "Prompts": "How fast is attention over prompts?",
    "Kernels": "How fast is each kernel beside its floor and stock PyTorch?",
    "Quantised weights": "What do FP8, INT8, INT4 and FP8 KV gain, and what do they cost?",
    "Mixture of experts": "How fast are experts, alone and in whole steps?",
    "Images": "How fast is the vision tower?",
    "Qwen3.5 on CUDA": "How fast and how exact is linear attention?",
    "Several GPUs": "What do sums between GPUs cost?",
    "TensorRT": "How fast and how exact are TensorRT engines?",
    "Validation": "Which pairs passed `validate` on a GPU, and what does it cost?",
    "Servers": "What does serving cost, and what happens under load and attack?",
    "CPU": "How fast are builds, decoding and image preparation without a GPU?",
}
"""Sections of the page in order, each with the question that it answers."""

_HEAD = """# Measurements

For engineers who compare engines or look for regressions: what was measured, where, and how.

`python -m benchmarks.render_measurements` writes this page from the files of
`benchmarks/results/<machine>/`. To add a measurement, add a file and run it. A figure holds for its
machine and its conditions. Compare figures only within one entry.

"Measured at" names the commit that ran. "Recorded in" names the commit that recorded the figures.
An entry is removed when its code is replaced; git keeps it.

**No published checkpoint was measured.** Weights are random, zeros, or those of the trained tiny
pairs in `examples`. With random weights no draft is right, so a speculative step shows its cost,
not its gain.
"""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Table(_Record):
    """A table.

    Attributes:
        caption: what the cells are, with their unit.
        better: which of a pair is better; None: the table has no pairs.
        rows: a label and a cell for each further column.
    """

    caption: str
    better: Literal["low", "high"] | None = None
    columns: tuple[str, ...] = Field(min_length=2)
    rows: tuple[tuple[Cell, ...], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_rows(self) -> Table:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"row {row[0]!r}: expected {len(self.columns)} cells")
            if self.better is None and any(isinstance(cell, tuple) for cell in row):
                raise ValueError(f"row {row[0]!r}: a pair needs better: low or high")
        return self


class Result(_Record):
    """A measurement.

    Attributes:
        section: a key of ``SECTIONS``.
        position: order within it.
        commit: of the code.
        commit_is: whether the commit ran (``measured at``) or recorded the figures.
        commands: commands of the measurement; empty: a script that was not kept.
        ours, theirs: the mode of each side; empty ``theirs``: nothing was compared.
        random: what was random: weights, drafts, prompts.
    """

    section: str
    position: int
    title: str
    machine: str
    date: str
    commit: str
    commit_is: Literal["measured at", "recorded in"]
    commands: tuple[str, ...]
    versions: str
    ours: str
    theirs: str = ""
    random: str
    tables: tuple[Table, ...] = Field(min_length=1)
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_section(self) -> Result:
        if self.section not in SECTIONS:
            raise ValueError(f"section: expected one of {list(SECTIONS)}, got {self.section!r}")
        return self


def read_results(folder: Path = RESULTS) -> list[Result]:
    """Return all results below ``folder``, in the order of the page."""
    files = sorted(folder.glob("*/*.json"))
    results = [_read(file) for file in files]
    order = list(SECTIONS)
    return sorted(results, key=lambda r: (order.index(r.section), r.position))


def _read(file: Path) -> Result:
    text = file.read_text(encoding="utf-8")
    return Result.model_validate(json.loads(text, parse_float=Decimal))


def page(results: list[Result]) -> str:
    """Return the whole page."""
    links = ", ".join(f"[{section}](#{_anchor(section)})" for section in SECTIONS)
    parts = [_HEAD, f"Sections: {links}.\n"]
    for section, question in SECTIONS.items():
        parts += [f"## {section}\n\n{question}\n"]
        parts += [_entry(result) for result in results if result.section == section]
    return "\n".join(parts)


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _entry(result: Result) -> str:
    commands = ", ".join(f"`{command}`" for command in result.commands)
    by = f"By {commands}." if commands else "By a script that was not kept."
    conditions = [
        f"{result.date}; {result.machine}; {result.commit_is} {result.commit};",
        f"versions: {result.versions}.",
        f"Ours: {result.ours}.",
        f"Theirs: {result.theirs}." if result.theirs else "",
        f"Random: {result.random}.",
        by,
    ]
    lines = [
        f"### {result.title}\n",
        " ".join(filter(None, conditions)) + "\n",
        *(_table(table) for table in result.tables),
        *(f"- {note}" for note in result.notes),
        *([""] if result.notes else []),
    ]
    return "\n".join(lines)


def _table(table: Table) -> str:
    head = [_caption(table), "", _row(table.columns), "|---" * len(table.columns) + "|"]
    rows = [_row([_cell(cell, table) for cell in row]) for row in table.rows]
    return "\n".join([*head, *rows, ""])


def _caption(table: Table) -> str:
    pairs = [_winner(c, table) for row in table.rows for c in row if isinstance(c, tuple)]
    if not pairs:
        return f"{table.caption}:"
    wins = f"ours is better in {pairs.count(0)} of {len(pairs)} cells"
    return f"{table.caption}; ours / theirs, bold is better; {wins}:"


def _row(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell, table: Table) -> str:
    if not isinstance(cell, tuple):
        return _text(cell)
    texts = [_text(value) for value in cell]
    best = _winner(cell, table)
    if best is not None:
        texts[best] = f"**{texts[best]}**"
    return " / ".join(texts)


def _winner(pair: tuple[Value, Value], table: Table) -> int | None:
    """Return the index of the better number; None if they are equal or not both numbers."""
    ours, theirs = pair
    if isinstance(ours, str) or isinstance(theirs, str) or ours == theirs:
        return None
    return int((ours < theirs) != (table.better == "low"))


def _text(value: Value | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:,}"


@click.command()
@click.option("--check", is_flag=True, help="Fail if the page is not current.")
def main(check: bool) -> None:
    """Write docs/measurements.md from the files of benchmarks/results."""
    text = page(read_results())
    if check and FILE.read_text(encoding="utf-8") != text:
        raise click.ClickException("docs/measurements.md is not current")
    if not check:
        FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
