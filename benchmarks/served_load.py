"""Time of an engine under load, by part: ``python -m benchmarks.served_load BUNDLE``.

Clients in this process send a real engine the requests that ``benchmarks.load`` sends over HTTP. It
starts as a server does, and cached prefixes fill its pages, as in a server after an hour. Prints
tokens per second and, by kind of step, number and duration of the steps, the host's time in them,
and the idle time of the engine's thread. ``--speculation both`` serves each load with and without
speculation in turn, and prints the ratio.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.full_prefix_cache import fill_prefix_cache
from benchmarks.host_time import HostTime
from benchmarks.simulated_acceptance import acceptance_rate, simulated_acceptance
from benchmarks.step_trace import StepTrace, TracedStep, kinds
from benchmarks.traffic import MAX_WORDS, Body, body_source, request_of
from trt_eagle3.bench.result import Percentiles
from trt_eagle3.bench.workload import Load, Run, drive, open_engine
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.request.request import Request
from trt_eagle3.io.run_command import run_command
from trt_eagle3.prompts.prompt_file import read_questions
from trt_eagle3.serving.warm_up import warm_up

__all__ = ["ServedLoad", "main", "measure", "summary"]

_PER_CLIENT = 3  # requests of a client in a round
_FEWEST = 12
_PAUSE_S = 0.2  # mean
_LENGTH_OF = 3  # tokens of the chain to which the acceptance length refers
_SIDES = {"on": (True,), "off": (False,), "both": (True, False)}
_SIDE_NAMES = {True: "speculative", False: "plain"}
Runs = Mapping[tuple[int, bool], Sequence[Run]]
"""Runs of each load, by clients and whether its requests allow speculation."""


@click.command()
@click.argument("path", metavar="BUNDLE", type=click.Path(path_type=Path))
@click.option("--clients", multiple=True, type=click.IntRange(1), default=(8, 32, 128))
@click.option("--speculation", type=click.Choice(list(_SIDES)), default="on", show_default=True)
@click.option("--length", type=float, help="Simulated acceptance length of a chain of 3.")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True)
@click.option("--prompts", "file", type=click.Path(path_type=Path), help="Default: random ones.")
@click.option("--images", default=0.3, show_default=True, help="Share of requests with an image.")
@click.option("--max-words", default=MAX_WORDS, show_default=True, help="Words of a random prompt.")
@click.option("--max-tokens", default=256, show_default=True, help="Tokens of an answer.")
def main(
    path: Path,
    clients: Sequence[int],
    speculation: str,
    length: float | None,
    rounds: int,
    file: Path | None,
    images: float,
    max_words: int,
    max_tokens: int,
) -> None:
    """Serve BUNDLE to clients of this process, and print the engine's time by part."""
    questions = read_questions(file) if file else None
    bodies = body_source(
        questions,
        images=images,
        max_tokens=max_tokens,
        max_words=max_words,
    )
    console = Console(width=120)
    with ExitStack() as stack:
        if length is not None:
            rate = acceptance_rate(length, _LENGTH_OF)
            stack.enter_context(simulated_acceptance(rate))
        engine = stack.enter_context(open_engine(path, prefix_cache=True))
        console.print(f"ready after {warm_up(engine):.1f} s")
        fill_prefix_cache(engine)
        found: dict[tuple[int, bool], list[Run]] = {}
        for count in clients:
            load, size = Load(count, pause_s=_PAUSE_S), max(_FEWEST, _PER_CLIENT * count)
            if questions is not None:  # prompts repeat: a first run caches them for both sides
                drive(engine, _requests(bodies(size, 0, 0), speculation=True), load)
            for number, drafting in _turns(_SIDES[speculation], rounds):
                asked = bodies(size, number, 2 * count + drafting)
                served = measure(engine, _requests(asked, speculation=drafting), load)
                console.print(_SIDE_NAMES[drafting], *served.lines(), sep="\n")
                console.print(served.table())
                found.setdefault((count, drafting), []).append(served.run)
    console.print(summary(found))


def _requests(asked: Sequence[Body], *, speculation: bool) -> list[Request]:
    return [request_of(body, speculation=speculation) for body in asked]


def _turns(sides: Sequence[bool], rounds: int) -> Iterator[tuple[int, bool]]:
    """Yield round and side; the order of the sides alternates between rounds."""
    for number in range(rounds):
        for drafting in reversed(sides) if number % 2 else sides:
            yield number, drafting


def summary(found: Runs) -> Table:
    """Return tokens per second of each load over all rounds, and the ratio if both sides ran."""
    table = Table("clients", "plain, tokens/s", "speculative", "ratio", "acceptance length")
    for count in dict.fromkeys(count for count, _ in found):
        speed = {
            drafting: _tokens_per_second(found.get((count, drafting), ()))
            for drafting in (False, True)
        }
        plain, speculative = speed[False], speed[True]
        table.add_row(
            str(count),
            f"{plain:.0f}" if plain else "",
            f"{speculative:.0f}" if speculative else "",
            f"{speculative / plain:.3f}" if plain and speculative else "",
            _acceptance_length(found.get((count, True), ())),
        )
    return table


def _tokens_per_second(runs: Sequence[Run]) -> float:
    """Return tokens per second over all runs; 0 for no runs."""
    seconds = sum(run.seconds for run in runs)
    return sum(run.num_tokens for run in runs) / seconds if seconds else 0.0


def _acceptance_length(runs: Sequence[Run]) -> str:
    """Format the mean tokens of drafting cycles, bonus token included."""
    cycles = sum(run.cycles for run in runs)
    return f"{1 + sum(sum(run.accepted) for run in runs) / cycles:.2f}" if cycles else ""


@dataclass(frozen=True)
class ServedLoad:
    """Measurements of one load.

    Attributes:
        host: seconds of the engine's thread in the parts of steps (``HostTime``).
    """

    load: Load
    run: Run
    steps: Sequence[TracedStep]
    host: Mapping[str, float]

    def lines(self) -> list[str]:
        """Return tokens per second, the clients' times, and the host's parts, longest first."""
        first = Percentiles.of_seconds(self.run.first)
        gaps = Percentiles.of_seconds(self.run.gaps)
        assert first is not None
        assert gaps is not None
        ordered = sorted(self.host.items(), key=lambda part: -part[1])
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in ordered if seconds >= 0.005)
        return [
            f"{self.load.name} clients: {self.run.tokens_per_second:.0f} tokens/s, first token p50 "
            f"{first.p50:.0f} ms, gaps p50 / p99 {gaps.p50:.1f} / {gaps.p99:.0f} ms",
            f"host, seconds of {self.run.seconds:.2f}: {parts}",
        ]

    def table(self) -> Table:
        """Return a table by kind of step."""
        table = Table("steps", "count", "p50, ms", "seconds", "share, %")
        for kind in kinds(self.steps):
            share = f"{100 * kind.seconds / self.run.seconds:.1f}"
            cells = (str(kind.count), f"{kind.median_ms:.2f}", f"{kind.seconds:.2f}")
            table.add_row(kind.name, *cells, share)
        return table


def measure(engine: LLM, requests: Sequence[Request], load: Load) -> ServedLoad:
    """Serve ``requests`` under ``load``."""
    with StepTrace() as trace, HostTime() as host:
        run = drive(engine, requests, load, seed=1)
    return ServedLoad(load, run, trace.steps, dict(host.seconds))


if __name__ == "__main__":
    run_command(main)
