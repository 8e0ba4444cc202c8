"""Speculation against none at every load: ``python -m trt_eagle3.bench.width``.

A pair of a published geometry in bfloat16 with random weights, through the real scheduler; its
drafts are right by chance (``simulated_acceptance``). In every case the adaptive plan begins as a
server's does: prompts and catching up have run, it has seen the graphs captured, and nothing was
served; what it learns and tries counts. As many plain cycles run before and after it. Prompts are
in the prefix cache: decoding alone is timed.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import click
import torch
from rich.console import Console
from rich.table import Table

from trt_eagle3.bench.live_plan import live_plan
from trt_eagle3.bench.random_pair import RandomPair, random_pair
from trt_eagle3.bench.simulated_acceptance import (
    acceptance_length,
    acceptance_rate,
    simulated_acceptance,
)
from trt_eagle3.bench.synthetic import size_option
from trt_eagle3.bench.width_trace import TracedCycle, TracedPlan, ledger, trace_lines
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.capture import prime_sizes, run_catch_ups, run_prompts
from trt_eagle3.decode.decoder import Decoder
from trt_eagle3.decode.plan import Plan, TreePlan, shrunk, widths
from trt_eagle3.decode.prefix_cache import PrefixCache
from trt_eagle3.decode.prompt import Prompt
from trt_eagle3.decode.scheduler import Scheduler
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.decode.tree import configured_tree
from trt_eagle3.io.run_command import run_command

__all__ = ["main"]

_STEPS = 5
_LENGTH_OF = 3  # acceptance lengths are those of a chain of so many
_WARM, _TIMED = 6, 24  # cycles of a fixed width
_LOSSES = (
    "case",
    "plain before, ms",
    "within (median)",
    "after",
    "lost by plain cycles, %",
    "next to drafted ones",
    "catching up",
    "drafted",
    "all",
    "rows caught up",
)


@click.command()
@size_option
@click.option("--context", default=1024, show_default=True, help="Tokens of every prompt.")
@click.option("--room", default=1024, show_default=True, help="Tokens of every answer at most.")
@click.option(
    "--batch", "batches", multiple=True, type=int, default=(1, 2, 4, 8, 32), show_default=True
)
@click.option(
    "--length",
    "lengths",
    multiple=True,
    type=float,
    default=(1.0, 2.0, 3.0),
    show_default=True,
    help="Acceptance lengths that a chain of 3 has.",
)
@click.option("--cycles", default=200, show_default=True, help="Of every adaptive case.")
@click.option("--trace", is_flag=True, help="Also print every adaptive case, cycle by cycle.")
def main(
    size: str,
    context: int,
    room: int,
    batches: tuple[int, ...],
    lengths: tuple[float, ...],
    cycles: int,
    trace: bool,
) -> None:
    """Print served tokens per second over those of plain decoding, and where time was lost."""
    fixed = Table("ms a cycle", *(f"B {batch}" for batch in batches))
    ratios = Table("over plain", *(f"B {batch}" for batch in batches))
    losses = Table(*_LOSSES)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        pair = random_pair(
            Path(folder), size, 16, max_seq_len=context + room, max_batch_size=max(batches)
        )
        bench = _Bench(pair, context, max(batches))
        ms = {(batch, n): bench.fixed_ms(batch, n) for n in bench.widths for batch in batches}
        for n in bench.widths:
            name = f"chain of {n - 1}" if n > 1 else "plain"
            fixed.add_row(name, *(f"{ms[batch, n]:.2f}" for batch in batches))
        for length in lengths:
            rate = acceptance_rate(length, _LENGTH_OF)
            cells = []
            for batch in batches:
                best = max(acceptance_length(rate, n - 1) / ms[batch, n] for n in bench.widths)
                run = bench.adaptive(batch, rate, cycles)
                plain = batch / run.plain_ms
                if trace:
                    print(f"B {batch}, length {length:g}, plain {run.plain_ms:.2f} ms:")
                    print(*trace_lines(run.trace), sep="\n")
                cells.append(
                    f"{run.speed() / plain:.3f}, late {run.speed(late=True) / plain:.3f}, "
                    f"best {best * ms[batch, 1]:.2f} {run.chosen}"
                )
                losses.add_row(f"B {batch}, length {length:g}", *run.losses(batch))
            ratios.add_row(f"length {length:g} (rate {rate:.2f})", *cells)
    console = Console(width=220)
    console.print(fixed, ratios, losses, torch.cuda.get_device_name())


@dataclass
class _Run:
    """What was served: seconds and tokens of every cycle, and how many tokens it drafted.

    ``before``, ``after``: mean milliseconds of plain cycles without speculation. ``trace``: its
    cycles.
    """

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    before: float = 0.0
    after: float = 0.0
    trace: Sequence[TracedCycle] = ()

    @property
    def plain_ms(self) -> float:
        """Mean milliseconds of a plain cycle without speculation."""
        return (self.before + self.after) / 2

    def speed(self, *, late: bool = False) -> float:
        """Tokens a millisecond; ``late``: of the second half."""
        start = len(self.tokens) // 2 if late else 0
        return sum(self.tokens[start:]) / (1e3 * sum(self.seconds[start:]))

    def losses(self, batch: int) -> list[str]:
        """The cells of ``_LOSSES`` behind the case."""
        found = ledger(self.trace, batch, self.plain_ms)
        times = (self.before, found.plain_ms, self.after)
        shares = (found.plain, found.switching, found.caught_up, found.drafted, found.total)
        rows = sum(cycle.caught_up for cycle in self.trace)
        return [*(f"{ms:.3f}" for ms in times), *(f"{100 * x:+.2f}" for x in shares), str(rows)]

    @property
    def chosen(self) -> str:
        """Draft tokens of cycles, by how many cycles had them."""
        return " ".join(f"{n}:{count}" for n, count in sorted(Counter(self.drafted).items()))


class _Bench:
    """Cases over one pair, whose prompts are computed once."""

    def __init__(self, pair: RandomPair, context: int, batch: int) -> None:
        self._pair = pair
        self._config = SpeculationConfig(steps=_STEPS)
        self.widths = widths(configured_tree(self._config).num_nodes)
        self._decoder: Decoder = pair.decoder(prefill_chunk=2048)
        self._prefixes = PrefixCache(pair.pool)
        self._prompts: list[Prompt] = [pair.sequence(context).prompt for _ in range(batch)]
        run_prompts(self._decoder, pair.pool, pair.spec.vocab_size)
        self._catch_ups = run_catch_ups(self._decoder, pair.pool, pair.spec.vocab_size)
        self._end(self._begin(Plan({1: None}), batch))

    def fixed_ms(self, batch: int, num_nodes: int) -> float:
        """Median milliseconds of a cycle of one width."""
        scheduler = self._begin(Plan({1: shrunk(self._config, num_nodes)}), batch)
        run = self._run(scheduler, _WARM + _TIMED)
        self._end(scheduler)
        return 1e3 * median(run.seconds[_WARM:])

    def adaptive(self, batch: int, rate: float, cycles: int) -> _Run:
        """Serve by a plan that knows what its cycles cost, and nothing of the draft."""
        plan = TracedPlan(live_plan(self._config))
        self._capture(plan, batch)
        before = self._plain(batch, cycles)
        scheduler = self._begin(plan, batch)
        with simulated_acceptance(rate):
            run = self._run(scheduler, cycles)
        self._end(scheduler)
        traced = plan.cycles[-len(run.seconds) :]  # behind those beside the prefill
        run.trace = [replace(c, ms=1e3 * s) for c, s in zip(traced, run.seconds, strict=True)]
        run.before, run.after = before, self._plain(batch, cycles)
        return run

    def _capture(self, plan: TreePlan, batch: int) -> None:
        """Let ``plan`` hear what cycles of so many cost, as when a server starts."""
        decoder_cycles, table_len = self._decoder.async_cycles, self._pair.pool.table_len
        assert decoder_cycles is not None
        assert table_len is not None
        for num_rows, seconds in self._catch_ups:
            plan.prime_catch_up(num_rows, seconds)
        prime_sizes(decoder_cycles, plan, table_len, [batch, 1])

    def _plain(self, batch: int, cycles: int) -> float:
        """Mean milliseconds of ``cycles`` plain cycles."""
        scheduler = self._begin(Plan({1: None}), batch)
        run = self._run(scheduler, cycles)
        self._end(scheduler)
        return 1e3 * sum(run.seconds) / len(run.seconds)

    def _begin(self, plan: TreePlan, batch: int) -> Scheduler:
        scheduler = Scheduler(
            self._decoder,
            max_batch_size=batch,
            tree_for=plan.tree_for,
            observer=plan,
            prefix_cache=self._prefixes,
        )
        for prompt in self._prompts[:batch]:
            vocab_size = self._pair.spec.vocab_size
            scheduler.add(SequenceState(prompt, self._pair.pool, vocab_size, drafting=True))
        while scheduler.waiting or any(not s.prefilled for s in scheduler.running):
            scheduler.step()
        return scheduler

    def _run(self, scheduler: Scheduler, cycles: int) -> _Run:
        run, last = _Run(), time.perf_counter()
        while len(run.seconds) < cycles:
            emissions = scheduler.step()
            now = time.perf_counter()
            run.seconds.append(now - last)
            run.tokens.append(sum(len(e.tokens) for e in emissions))
            run.drafted.append(scheduler.num_draft_tokens or 0)
            last = now
            if any(e.full or e.error for e in emissions):
                break
        return run

    def _end(self, scheduler: Scheduler) -> None:
        for sequence in list(scheduler.running):
            scheduler.remove(sequence)


if __name__ == "__main__":
    run_command(main)
