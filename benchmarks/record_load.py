"""Record the steps of a served load under every tree: ``python -m benchmarks.record_load BUNDLE
OUT.json.gz``.

Clients in this process send requests to a real engine, one after the other, as
``benchmarks.served_load`` does. Each load is served once without the draft, once with the draft
admitted but no tree, once with each tree, and once with a policy that alternates between no tree
and the widest one. Acceptance is simulated (``simulated_acceptance``), so its rate is known.
``benchmarks.replay_policy`` replays these steps to evaluate a policy.

Every step is one row of ``FIELDS``: integers, times in microseconds.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from benchmarks.full_prefix_cache import fill_prefix_cache
from benchmarks.simulated_acceptance import acceptance_rate, simulated_acceptance
from benchmarks.traffic import drawn_bodies, request_of
from trt_eagle3.bench.workload import open_engine, pauses
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.policy.candidate import candidates_of
from trt_eagle3.decode.policy.protocol import BatchState, StepStats
from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.speculation.tree import AnyTree
from trt_eagle3.engine.bundle.read import read_bundle
from trt_eagle3.io.run_command import run_command
from trt_eagle3.serving.warm_up import warm_up

__all__ = ["FIELDS", "RecordingPolicy", "main"]

FIELDS = (
    "us",  # since the end of the previous step; 0: the engine was idle in between
    "prompt_rows",
    "batch",  # sequences that decoded
    "tree",  # nodes verified per sequence, root included
    "tokens",  # emitted by all sequences
    "drafting",  # sequences with a draft
    "backfilled",  # rows that the draft backfilled
    "prefilling",  # sequences in prefill
)
_PAUSE_S = 0.2  # mean, before each request of a client; as in benchmarks.served_load
_IMAGE_SHARE = 0.3  # share of the requests with an image; as in benchmarks.served_load
_MAX_TOKENS = 256
_TURN = 24  # steps of each tree under the alternating policy


class RecordingPolicy:
    """A policy that serves given trees in turn and records every step.

    Attributes:
        rows: ``FIELDS`` of every step in which sequences decoded.
    """

    speculates = True
    needs_costs = False

    def __init__(self, trees: Sequence[AnyTree | None]) -> None:
        """``trees``: all trees that may be served, None first."""
        self.trees = trees
        self.rows: list[list[int]] = []
        self._turns: Iterator[AnyTree | None] = itertools.repeat(None)
        self._now: AnyTree | None = None
        self._admits = False

    def serve(self, trees: Sequence[AnyTree | None], *, admits: bool) -> None:
        """Serve ``trees`` in turn, ``_TURN`` steps each. ``admits``: run the draft over prompts."""
        spread = itertools.chain.from_iterable(itertools.repeat(t, _TURN) for t in trees)
        self._turns, self.rows = itertools.cycle(spread), []
        self._now, self._admits = next(self._turns), admits

    def choose(self, batch: BatchState) -> AnyTree | None:
        """Return the tree of this turn."""
        return self._now if batch.num_drafting else None

    def should_draft(self, _batch: BatchState) -> bool:
        """Return the ``admits`` of ``serve``."""
        return self._admits

    def trees_at(self, _batch_size: int) -> Sequence[AnyTree | None]:
        """Return all trees."""
        return self.trees

    def prime(self, *_: object) -> None:
        """Ignore the costs: this policy learns nothing."""

    def prime_prompts(self, *_: object) -> None:
        """Ignore the costs: this policy learns nothing."""

    def prompt_rows(self, *_: object) -> None:
        """Return None: the costs are not known."""

    def record(self, stats: StepStats) -> None:
        """Record the step and advance to the next turn."""
        batch = stats.batch
        seconds, waiting = stats.seconds or 0.0, batch.num_running - batch.size
        row = [round(1e6 * seconds), stats.prompt_rows, batch.size, stats.num_nodes]
        row += [stats.num_tokens, batch.num_drafting, stats.backfilled_rows, waiting]
        self.rows.append(row)
        self._now = next(self._turns)


@dataclass(frozen=True)
class Trace:
    """One load under one policy.

    Attributes:
        length: acceptance length of a chain of ``chain`` drafted tokens.
        admits: whether the draft ran over prompts.
        trees: sizes in nodes of the trees served in turn.
        tokens: number of tokens emitted in ``seconds``.
        steps: rows of ``FIELDS``.
    """

    clients: int
    length: float
    chain: int
    admits: bool
    trees: tuple[int, ...]
    tokens: int
    seconds: float
    steps: list[list[int]]


async def _serve(engine: LLM, requests: Iterator[Request], clients: int, seconds: float) -> int:
    """Run closed loops of ``clients`` for ``seconds``; return the tokens that they read."""
    breaks, end, tokens = pauses(1, _PAUSE_S), time.perf_counter() + seconds, 0

    async def read() -> None:
        nonlocal tokens
        while time.perf_counter() < end:
            await asyncio.sleep(next(breaks))
            async for chunk in engine.submit(next(requests)):
                if time.perf_counter() < end:
                    tokens += len(chunk.token_ids)

    readers = [asyncio.create_task(read()) for _ in range(clients)]
    await asyncio.sleep(seconds)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    return tokens


def _requests(salt: int) -> Iterator[Request]:
    """Yield requests with the same sizes in every run, and contents that depend on ``salt``."""
    for seed in itertools.count():
        bodies = drawn_bodies(
            256, seed=seed, salt=salt, images=_IMAGE_SHARE, max_tokens=_MAX_TOKENS
        )
        for body in bodies:
            yield request_of(body, speculation=True)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--clients", multiple=True, type=click.IntRange(1), default=(1, 8, 32, 64, 128))
@click.option("--length", "lengths", multiple=True, type=float, default=(1.0, 2.0, 3.0))
@click.option("--seconds", default=5.0, show_default=True, help="Seconds of each run.")
@click.option("--limit", default=480.0, show_default=True, help="Stop after so many seconds.")
def main(
    bundle: Path,
    out: Path,
    clients: Sequence[int],
    lengths: Sequence[float],
    seconds: float,
    limit: float,
) -> None:
    """Record BUNDLE's steps into OUT.json.gz."""
    start = time.perf_counter()
    traces: list[Trace] = []
    config = read_bundle(bundle).config.speculation
    trees = [candidate.tree for candidate in candidates_of(config)]
    chain, policy = max(t.num_nodes for t in trees if t) - 1, RecordingPolicy(trees)
    with open_engine(bundle, prefix_cache=True, policy=policy) as engine:
        with simulated_acceptance(0.0):
            click.echo(f"ready after {warm_up(engine):.1f} s")
            fill_prefix_cache(engine)
        served = itertools.count()
        for count in clients:
            runs: list[tuple[float, tuple[AnyTree | None, ...], bool]] = [
                (1.0, (None,), False),
                (1.0, (None,), True),
                (lengths[-1], (None, trees[-1]), True),
            ]
            runs += [(length, (tree,), True) for length in lengths for tree in trees[1:]]
            for length, served_trees, admits in runs:
                if time.perf_counter() - start > limit:
                    break
                policy.serve(served_trees, admits=admits)
                rate = acceptance_rate(length, chain) if length > 1 else 0.0
                before = time.perf_counter()
                with simulated_acceptance(rate):
                    tokens = asyncio.run(_serve(engine, _requests(next(served)), count, seconds))
                rows = policy.rows
                nodes = tuple(t.num_nodes if t else 1 for t in served_trees)
                taken = time.perf_counter() - before
                traces.append(Trace(count, length, chain, admits, nodes, tokens, taken, rows))
                drafted = [row for row in rows if row[3] > 1]
                emitted = sum(r[4] for r in drafted) / max(sum(r[2] for r in drafted), 1)
                click.echo(
                    f"{count} clients, length {length}, trees {nodes}, admits {admits}: "
                    f"{tokens / seconds:.0f} tokens/s, {len(rows)} steps, drafts {emitted:.2f}"
                )
    data = {"fields": FIELDS, "bundle": bundle.name, "traces": [asdict(t) for t in traces]}
    with gzip.open(out, "wt") as file:
        json.dump(data, file, separators=(",", ":"))
    click.echo(f"{out}: {out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    run_command(main)
