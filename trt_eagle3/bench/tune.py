"""bench --tune: measure the cost of a step on this machine, and write it into the bundle.

The cost depends on batch size and tree size. Each step is timed with a full batch and answers that
do not end. Acceptance is not measured here: it depends on the prompts, and the policy estimates it
from served requests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from trt_eagle3.atomic_io import write_file
from trt_eagle3.bench import ROUNDS
from trt_eagle3.bench.workload import Load, Progress, batch_sizes, drive, make_requests, open_engine
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.policy.candidate import candidate_sizes, shrunk
from trt_eagle3.decode.policy.protocol import FixedPolicy
from trt_eagle3.decode.policy.tuning import TUNING_FILE, TuningEntry, TuningTable
from trt_eagle3.decode.speculation.tree import configured_tree
from trt_eagle3.engine.runtime.machine import machine_name
from trt_eagle3.errors import UserError
from trt_eagle3.io.terminal_text import TextTable
from trt_eagle3.prompts.kept import PromptsOrigin, origin_of, questions_for
from trt_eagle3.prompts.prompt_file import Question

__all__ = ["TuneReport", "tune", "write_table"]

_TIMED_TOKENS = 64


@dataclass(frozen=True)
class TuneReport:
    """The table, its file, and the origin of its prompts."""

    file: Path
    table: TuningTable
    prompts: PromptsOrigin = "file"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "file": str(self.file),
            "prompts": self.prompts,
            **self.table.model_dump(mode="json"),
        }

    def tables(self) -> list[TextTable]:
        """Return the cost of a step, and the acceptance length from which each tree pays.

        The first is in milliseconds, by batch size and tree size. The second is the cost of a
        tree's step over that of a step without speculation.
        """
        counts = list(self.table.entries[0].cycle_ms)
        cost = TextTable("sequences", *(f"{n} tokens, ms" if n > 1 else "off, ms" for n in counts))
        least = TextTable("sequences", *(f"{n} tokens\npay from" for n in counts if n > 1))
        for entry in self.table.entries:
            ms = entry.cycle_ms
            cost.add_row(str(entry.batch_size), *(f"{ms[n]:.2f}" for n in counts))
            lengths = [f"{ms[n] / ms[1]:.2f}" for n in counts if n > 1]
            least.add_row(str(entry.batch_size), *lengths)
        return [cost, least]


def tune(
    bundle: Path,
    *,
    prompts: Path | None = None,
    batches: Sequence[int] = (),
    rounds: int = ROUNDS,
    tensor_parallel: int | None = None,
    progress: Progress = lambda *_: None,
) -> TuneReport:
    """Measure, and write ``tuning.json`` into the bundle; arguments as in ``bench``.

    Raises:
        UserError: the bundle has no draft, is invalid or cannot be written, or the prompts are
            invalid.
    """
    # a damaged old table must not prevent a new one
    engine = open_engine(bundle, policy=FixedPolicy(None), tensor_parallel=tensor_parallel)
    if engine.bundle.manifest is None:
        raise UserError(f"{bundle}: a bundle without a draft: there is nothing to tune")
    if not os.access(bundle, os.W_OK):
        raise UserError(
            f"{bundle}: not writable, and the table goes into it. Tune a writable copy of the "
            "bundle."
        )
    questions = questions_for(bundle, prompts, vision=engine.bundle.spec.vision is not None)
    config = engine.bundle.record.config.speculation
    sizes = batch_sizes(engine, batches)
    counts = candidate_sizes(configured_tree(config).num_nodes)
    try:
        cycles = _cycles(engine, config, questions, sizes, counts, rounds, progress)
    finally:
        engine.close()
    table = TuningTable(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine_name(engine.bundle.device),
        speculation=config,
        entries=tuple(TuningEntry(batch_size=size, cycle_ms=cycles[size]) for size in sizes),
    )
    return TuneReport(write_table(bundle, table), table, origin_of(bundle, prompts))


def write_table(bundle: Path, table: TuningTable) -> Path:
    """Write ``table`` into the bundle atomically.

    Raises:
        UserError: the bundle cannot be written.
    """
    file = bundle / TUNING_FILE
    try:
        write_file(file, f"{table.model_dump_json(indent=2)}\n".encode())
    except OSError as error:
        raise UserError(f"{file}: cannot write the table: {error.strerror or error}") from error
    return file


def _cycles(
    engine: LLM,
    config: SpeculationConfig,
    questions: Sequence[Question],
    sizes: Sequence[int],
    counts: Sequence[int],
    rounds: int,
    progress: Progress,
) -> dict[int, dict[int, float]]:
    """Return milliseconds of a cycle by batch size and number of draft tokens.

    Each is the median over rounds of median cycles.
    """
    times: dict[int, dict[int, list[float]]] = {size: {n: [] for n in counts} for size in sizes}
    for number in range(rounds + 1):
        for index, size in enumerate(sizes):
            progress("cycles", number * len(sizes) + index, (rounds + 1) * len(sizes))
            for count in counts if number % 2 else counts[::-1]:
                engine.use_policy(FixedPolicy(shrunk(config, count)))
                requests = make_requests(questions, size, max_tokens=_TIMED_TOKENS, ignore_eos=True)
                run = drive(engine, requests, Load(size))
                gaps = [seconds for reply in run.replies for seconds, _ in reply.passes]
                if not gaps:
                    raise UserError(
                        "prompts: no room for an answer of two tokens. Give shorter prompts: "
                        "--prompts FILE"
                    )
                if number:
                    times[size][count].append(1000 * median(gaps))
    progress("cycles", 1, 1)
    return {
        size: {n: median(values) for n, values in of_size.items()}
        for size, of_size in times.items()
    }
