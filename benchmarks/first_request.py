"""Latency of the first request after a start, compared with the last of a hundred.

``python -m benchmarks.first_request``: a pair of a published geometry in bfloat16 with random
weights, through the real scheduler. It starts as a server does: a short answer, prompts of every
size, then the capture of CUDA graphs for decoding. Requests run one after the other. Each has its
own prompt, of a length that the start has not run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.random_pair import RandomPair, random_pair
from benchmarks.synthetic import size_option
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.policy.candidate import candidates_of
from trt_eagle3.decode.policy.speculation import SpeculationPolicy
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.decode.warm_up import capture_steps, run_backfills, run_prompts
from trt_eagle3.io.run_command import run_command

__all__ = ["main"]

_CAPTURE_SECONDS = 30.0
_LATE = 10  # number of last requests in a median


@click.command()
@size_option
@click.option("--context", default=1000, show_default=True, help="Tokens of every prompt.")
@click.option("--tokens", default=24, show_default=True, help="Least tokens of every answer.")
@click.option("--requests", "count", default=100, show_default=True)
@click.option("--batch", default=16, show_default=True, help="Largest batch of captured graphs.")
def main(size: str, context: int, tokens: int, count: int, batch: int) -> None:
    """Print milliseconds to the first and the last token, of the first and the last requests."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        room = context + tokens + 64
        pair = random_pair(Path(folder), size, 16, max_seq_len=room, max_batch_size=batch)
        engine = _Engine(pair, batch)
        start = time.perf_counter()
        engine.answer(8, 8)
        prompts = engine.run_prompts()
        captured = engine.capture()
        started = time.perf_counter() - start
        found = [engine.answer(context, tokens) for _ in range(count)]
    late = found[-_LATE:]
    table = Table("request", "first token, ms", "all, ms", "to the last ones")
    usual = median(f.all_ms for f in late)
    for name, some in (("1", found[:1]), ("2", found[1:2]), ("3", found[2:3]), ("last ones", late)):
        first, whole = (median(values) for values in _columns(some))
        table.add_row(name, f"{first:.1f}", f"{whole:.1f}", f"{whole / usual:.2f}")
    Console(width=120).print(table, _start(prompts, captured, started))


def _start(prompts: tuple[int, float], captured: int, seconds: float) -> str:
    return (
        f"start: {prompts[0]} prompts in {prompts[1]:.2f} s, graphs of {captured} batch sizes, "
        f"{seconds:.1f} s in all"
    )


@dataclass(frozen=True)
class _Times:
    """Milliseconds from a request's arrival."""

    first_ms: float
    all_ms: float


def _columns(found: Sequence[_Times]) -> tuple[list[float], list[float]]:
    return [f.first_ms for f in found], [f.all_ms for f in found]


class _Engine:
    """A scheduler with an adaptive policy, as in a server."""

    def __init__(self, pair: RandomPair, batch: int) -> None:
        self._pair = pair
        self._policy = SpeculationPolicy(candidates_of(SpeculationConfig()))
        self._decoder = pair.decoder(prefill_chunk=2048, max_batch_size=batch)
        self._scheduler = Scheduler(
            self._decoder,
            max_batch_size=batch,
            policy=self._policy,
        )

    def run_prompts(self) -> tuple[int, float]:
        """Return the number of prompt sizes that ran, and the seconds."""
        start = time.perf_counter()
        done = run_prompts(self._decoder, self._pair.pool, self._pair.spec.vocab_size)
        run_backfills(self._decoder, self._pair.pool, self._pair.spec.vocab_size)
        return done.count, time.perf_counter() - start

    def capture(self) -> int:
        """Return the number of batch sizes with graphs."""
        table_len = self._pair.pool.table_len
        assert table_len is not None
        return capture_steps(self._decoder, self._policy, table_len, _CAPTURE_SECONDS)

    def answer(self, context: int, tokens: int) -> _Times:
        """Serve one request."""
        start = time.perf_counter()
        sequence = self._pair.sequence(context)
        self._scheduler.add(sequence)
        while not sequence.tokens:
            self._scheduler.step()
        first = time.perf_counter()
        while len(sequence.tokens) < tokens:
            self._scheduler.step()
        end = time.perf_counter()
        self._scheduler.remove(sequence)
        return _Times(1e3 * (first - start), 1e3 * (end - start))


if __name__ == "__main__":
    run_command(main)
