"""bench --tune: how many draft tokens pay at each batch size on this machine, written into the
bundle.

Expected tokens per second of B sequences with trees of n nodes: B x acceptance length(n) / cycle
time(B, n). The cycle is timed with every place taken and answers that do not end; acceptance is
that of the prompts' own answers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from trt_eagle3.atomic_io import write_file
from trt_eagle3.bench import MAX_TOKENS, ROUNDS
from trt_eagle3.bench.workload import Load, Progress, batch_sizes, drive, make_requests, open_engine
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.plan import Plan, shrunk, widths
from trt_eagle3.decode.tree import configured_tree
from trt_eagle3.decode.tuning import TUNING_FILE, TuningEntry, TuningTable
from trt_eagle3.engine.machine import machine_name
from trt_eagle3.errors import UserError
from trt_eagle3.prompts.kept import questions_for
from trt_eagle3.prompts.prompt_file import Question

__all__ = ["TuneReport", "choose", "tune", "write_table"]

_GAIN = 1.03
"""What speculation must gain to be on: less is within what such a timing can tell."""
_TIMED_TOKENS = 64


@dataclass(frozen=True)
class TuneReport:
    """The table, and where it lies."""

    file: Path
    table: TuningTable

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"file": str(self.file), **self.table.model_dump(mode="json")}

    def tables(self) -> list[Table]:
        """Expected tokens per second by batch size and number of draft tokens, plain = 1; the
        choice is marked. Then the acceptance length from which so many tokens gain: what their
        cycle was measured to take over a plain one.
        """
        counts = list(self.table.entries[0].cycle_ms)
        speed = Table("sequences", *(f"{n} tokens" if n > 1 else "plain" for n in counts), "chosen")
        for entry in self.table.entries:
            rates = entry.tokens_per_second
            shown = [f"{rates[n] / rates[1]:.2f}" for n in counts]
            chosen = "off" if entry.num_draft_tokens == 1 else str(entry.num_draft_tokens)
            speed.add_row(str(entry.batch_size), *shown, chosen)
        drafted = [n for n in counts if n > 1]
        least = Table("sequences", *(f"{n} tokens pay from" for n in drafted))
        for entry in self.table.entries:
            lengths = [f"{entry.cycle_ms[n] / entry.cycle_ms[1]:.2f}" for n in drafted]
            least.add_row(str(entry.batch_size), *lengths)
        return [speed, least]


def tune(
    bundle: Path,
    *,
    prompts: Path | None = None,
    batches: Sequence[int] = (),
    rounds: int = ROUNDS,
    max_tokens: int = MAX_TOKENS,
    progress: Progress = lambda *_: None,
) -> TuneReport:
    """Measure, choose, and write ``tuning.json`` into the bundle; arguments as of ``bench``.

    Raises:
        UserError: a bundle without a draft or that cannot be written, or anything wrong with bundle
            or prompts.
    """
    # a damaged table does not hinder the next one
    engine = open_engine(bundle, plan=Plan({1: None}))
    if engine.bundle.manifest is None:
        raise UserError(f"{bundle}: a bundle without a draft: there is nothing to tune")
    if not os.access(bundle, os.W_OK):
        raise UserError(
            f"{bundle}: not writable, and the table goes into it. Tune a copy of the bundle that "
            "is."
        )
    questions = questions_for(bundle, prompts, vision=engine.bundle.spec.vision is not None)
    config = engine.bundle.record.config.speculation
    sizes, counts = batch_sizes(engine, batches), widths(configured_tree(config).num_nodes)
    try:
        acceptance = _acceptance(engine, config, questions, counts, max_tokens, progress)
        cycles = _cycles(engine, config, questions, sizes, counts, rounds, progress)
    finally:
        engine.close()
    lengths = {n: 1 + sum(rates) for n, rates in acceptance.items()}
    table = TuningTable(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine_name(engine.bundle.device),
        speculation=config,
        acceptance=acceptance,
        entries=tuple(choose(size, cycles[size], lengths) for size in sizes),
    )
    return TuneReport(write_table(bundle, table), table)


def choose(
    batch_size: int, cycle_ms: Mapping[int, float], acceptance_length: Mapping[int, float]
) -> TuningEntry:
    """What pays best at one batch size, from ``cycle_ms`` and ``acceptance_length`` by number of
    draft tokens.
    """
    rates = {n: 1000 * batch_size * acceptance_length[n] / cycle_ms[n] for n in cycle_ms}
    best = max(rates, key=lambda n: rates[n])
    return TuningEntry(
        batch_size=batch_size,
        num_draft_tokens=best if rates[best] >= _GAIN * rates[1] else 1,
        tokens_per_second=rates,
        cycle_ms=cycle_ms,
    )


def write_table(bundle: Path, table: TuningTable) -> Path:
    """Put ``table`` into the bundle, whole or not at all.

    Raises:
        UserError: the bundle cannot be written.
    """
    file = bundle / TUNING_FILE
    try:
        write_file(file, f"{table.model_dump_json(indent=2)}\n".encode())
    except OSError as error:
        raise UserError(f"{file}: cannot write the table: {error.strerror or error}") from error
    return file


def _acceptance(
    engine: LLM,
    config: SpeculationConfig,
    questions: Sequence[Question],
    counts: Sequence[int],
    max_tokens: int,
    progress: Progress,
) -> dict[int, tuple[float, ...]]:
    """The share of cycles that accepted so deep, by number of draft tokens."""
    found: dict[int, tuple[float, ...]] = {}
    for done, count in enumerate(counts):
        progress("acceptance", done, len(counts))
        engine.use_plan(Plan({1: shrunk(config, count)}))
        requests = make_requests(questions, len(questions), max_tokens=max_tokens)
        run = drive(engine, requests, Load(engine.bundle.limits.max_batch_size))
        found[count] = tuple(n / run.cycles for n in run.accepted if n) if run.cycles else ()
    progress("acceptance", 1, 1)
    return found


def _cycles(
    engine: LLM,
    config: SpeculationConfig,
    questions: Sequence[Question],
    sizes: Sequence[int],
    counts: Sequence[int],
    rounds: int,
    progress: Progress,
) -> dict[int, dict[int, float]]:
    """Milliseconds of a cycle by batch size and number of draft tokens: the median over rounds
    of median cycles.
    """
    times: dict[int, dict[int, list[float]]] = {size: {n: [] for n in counts} for size in sizes}
    for number in range(rounds + 1):
        for index, size in enumerate(sizes):
            progress("cycles", number * len(sizes) + index, (rounds + 1) * len(sizes))
            for count in counts if number % 2 else counts[::-1]:
                engine.use_plan(Plan({1: shrunk(config, count)}))
                requests = make_requests(questions, size, max_tokens=_TIMED_TOKENS, ignore_eos=True)
                run = drive(engine, requests, Load(size))
                gaps = [seconds for reply in run.replies for seconds, _ in reply.passes]
                if not gaps:
                    raise UserError(
                        "prompts: no room for an answer of two tokens. Give shorter ones: "
                        "--prompts FILE"
                    )
                if number:
                    times[size][count].append(1000 * median(gaps))
    progress("cycles", 1, 1)
    return {
        size: {n: median(values) for n, values in of_size.items()}
        for size, of_size in times.items()
    }
