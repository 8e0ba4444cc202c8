"""Load on a modelled GPU: ``python -m trt_eagle3.bench.modelled_load BUNDLE``.

The real engine serves texts of random lengths to clients that pause before each request. Its device
computes nothing, and takes as long as an H200 takes for an 8B (``modelled_times``), slowed down, so
that a machine without a GPU keeps up. What is left is what the scheduler makes of the device: how
many forwards it runs for the same answers, and how long they leave it idle.

Each load is served without speculation, and by live cost with drafts that are right by chance; an
engine begins as a server does, with its cycles timed, and with pages that cached prefixes fill.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from trt_eagle3.bench.live_plan import live_plan
from trt_eagle3.bench.modelled_times import (
    cycle_ms,
    draft_prompt_ms,
    mixed_ms,
    prompt_ms,
    short_cycle_ms,
)
from trt_eagle3.bench.result import Percentiles
from trt_eagle3.bench.simulated_acceptance import acceptance_rate, simulated_acceptance
from trt_eagle3.bench.stand_in import Forward, StandIn
from trt_eagle3.bench.traffic import drawn_bodies
from trt_eagle3.bench.workload import Load, drive, fill_prefix_cache, request_of
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.device_batch import batch_sizes
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.plan import Plan, TreePlan
from trt_eagle3.decode.request import Request
from trt_eagle3.decode.sampling_params import SamplingParams
from trt_eagle3.decode.tree import AnyTree
from trt_eagle3.io.run_command import run_command

__all__ = ["ModelledGpu", "Served", "main", "serve"]

_PER_CLIENT = 3  # requests
_PAUSE_S = 0.2  # mean
_MAX_TOKENS = 256
_MAX_SEQ_LEN = 4096
_CAUGHT_UP = (1, 256, 512, 1024)  # rows
_SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
_LENGTH_OF = 3  # acceptance lengths are those of a chain of so many


@click.command()
@click.argument("path", metavar="BUNDLE", type=click.Path(path_type=Path))
@click.option("--clients", multiple=True, type=click.IntRange(1), default=(1, 8, 32, 128))
@click.option(
    "--length",
    "lengths",
    multiple=True,
    type=float,
    default=(1.0, 2.0),
    show_default=True,
    help="Acceptance lengths that a chain of 3 has.",
)
@click.option("--max-words", default=300, show_default=True, help="Of a prompt.")
@click.option("--slower", default=5.0, show_default=True, help="Times that the GPU is slowed down.")
def main(
    path: Path, clients: Sequence[int], lengths: Sequence[float], max_words: int, slower: float
) -> None:
    """Serve BUNDLE on a modelled H200, and print the GPU's time, idle or not, and the clients'."""
    table = Table("clients", "drafts", "tokens/s", "to plain", *_COLUMNS)
    for count in clients:
        plain = serve(path, count, None, slower, max_words)
        for length in (None, *lengths):
            found = plain if length is None else serve(path, count, length, slower, max_words)
            name = "none" if length is None else f"of length {length:g}"
            ratio = f"{found.tokens_per_second / plain.tokens_per_second:.3f}"
            table.add_row(str(count), name, f"{found.tokens_per_second:.0f}", ratio, *found.cells())
    Console(width=120).print(table, "of the modelled GPU's time")


_COLUMNS = ("steps", "prefills", "draft's", "idle, %", "first token p50, ms", "gaps p50 / p99, ms")


@dataclass
class ModelledGpu:
    """How many forwards ran, and what each takes, ``slower`` times as long as an H200."""

    slower: float
    steps: int = 0  # also those in one forward with a prefill
    prefills: int = 0
    of_draft: int = 0

    def seconds_of(self, forward: Forward) -> float:
        """Count a forward; a cycle is the target's, with all that the draft does in it."""
        return self.slower * self._ms(forward) / 1e3

    def _ms(self, forward: Forward) -> float:
        rows = forward.batch * forward.width
        if forward.graph == "target":
            self.steps += not forward.is_prompt or forward.beside > 0
            self.prefills += forward.is_prompt
            if forward.beside:
                return mixed_ms(rows, forward.beside)
            # of a cycle each sequence has a row more than it has drafted
            drafted = forward.width - 1
            return prompt_ms(rows) if forward.is_prompt else cycle_ms(forward.batch, drafted)
        if forward.graph == "draft" and forward.is_prompt:
            self.of_draft += 1
            return draft_prompt_ms(rows)
        return 0.0


@dataclass(frozen=True)
class Served:
    """What a load took, in seconds of the modelled GPU's time.

    Attributes:
        first, gaps: of every answer to its first token, and between its passes.
    """

    gpu: ModelledGpu
    seconds: float
    idle_seconds: float
    num_tokens: int
    first: Sequence[float]
    gaps: Sequence[float]

    @property
    def tokens_per_second(self) -> float:
        """Of all answers together, from the first request to the last token."""
        return self.num_tokens / self.seconds

    def cells(self) -> list[str]:
        """As ``_COLUMNS`` names them."""
        first, gaps = Percentiles.of_seconds(self.first), Percentiles.of_seconds(self.gaps)
        assert first is not None
        assert gaps is not None
        counts = (self.gpu.steps, self.gpu.prefills, self.gpu.of_draft)
        idle = f"{100 * self.idle_seconds / self.seconds:.1f}"
        return [*map(str, counts), idle, f"{first.p50:.0f}", f"{gaps.p50:.1f} / {gaps.p99:.0f}"]


def serve(
    path: Path, clients: int, length: float | None, slower: float, max_words: int = 300
) -> Served:
    """Serve ``clients`` from ``path``; ``length``: acceptance length, None without speculation.
    ``max_words``: of a prompt.
    """
    gpu = ModelledGpu(slower)
    device = StandIn(gpu.seconds_of)
    bodies = drawn_bodies(
        _PER_CLIENT * clients, seed=0, pictures=0.0, max_tokens=_MAX_TOKENS, max_words=max_words
    )
    speculation = length is not None
    requests = [request_of(body, speculation=speculation) for body in bodies]
    with ExitStack() as stack:
        if length is not None:
            rate = acceptance_rate(length, _LENGTH_OF)
            stack.enter_context(simulated_acceptance(rate))
        engine = stack.enter_context(_engine(path, clients, device, length, slower))
        list(engine.submit(Request("What?", sampling=_SHORT, speculation=speculation)))
        fill_prefix_cache(engine)
        gpu.steps = gpu.prefills = gpu.of_draft = 0
        device.idle_seconds = 0.0
        run = drive(engine, requests, Load(clients, pause_s=slower * _PAUSE_S), seed=1)
    return Served(
        gpu,
        run.seconds / slower,
        device.idle_seconds / slower,
        run.num_tokens,
        [s / slower for s in run.first],
        [s / slower for s in run.gaps],
    )


@contextmanager
def _engine(
    path: Path, clients: int, device: StandIn, length: float | None, slower: float
) -> Iterator[LLM]:
    """An engine on ``device`` for so many at once."""
    plan = Plan({1: None}) if length is None else live_plan(SpeculationConfig())
    bundle = device.bundle(path, plan, clients, _MAX_SEQ_LEN)
    _prime(plan, clients, slower)
    with device.attached(), LLM(bundle) as engine:
        yield engine


def _prime(plan: TreePlan, clients: int, slower: float) -> None:
    """Tell ``plan`` what cycles over short contexts and catching up take, as a server does that has
    captured their graphs.
    """
    for num_rows in _CAUGHT_UP:
        plan.prime_catch_up(num_rows, slower * draft_prompt_ms(num_rows) / 1e3)
    for size in reversed(batch_sizes(clients)):
        for tree in plan.trees_at(size):
            plan.prime(tree, size, slower * short_cycle_ms(size, _depth(tree)) / 1e3)


def _depth(tree: AnyTree | None) -> int:
    return tree.steps if tree else 0


if __name__ == "__main__":
    run_command(main)
