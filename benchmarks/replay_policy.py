"""Evaluate the policy on recorded loads: ``python -m benchmarks.replay_policy FILE...``.

Each load of ``benchmarks.record_load`` is replayed: the policy chooses the tree of each step, and
the step takes the seconds of the next recorded step with that tree. A change of tree costs extra:
backfilled rows, and a step that was not launched ahead. The recorded load that alternates gives
these costs. Acceptance is drawn at random. The program prints tokens per second relative to
autoregressive decoding and to the best fixed tree, without the first seconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.simulated_acceptance import acceptance_rate
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.policy.candidate import candidates_of, shrunk
from trt_eagle3.decode.policy.protocol import BatchState, FixedPolicy, Policy, StepStats
from trt_eagle3.decode.policy.speculation import SpeculationPolicy
from trt_eagle3.io.run_command import run_command

__all__ = ["RecordedLoad", "Replay", "loads_of", "main", "replay"]

_RAMP_S = 2.0  # skipped start of a recording, while clients are still starting
_LEAST_RAMP_S = 0.3  # the same with few clients
_CROWD = 32  # least clients for which _RAMP_S is skipped
_ANSWER_TOKENS = (16, 256)  # as in benchmarks.traffic
_MAX_DEFERRED = 448  # maximum rows of a sequence that wait for backfilling

Row = Mapping[str, int]


@dataclass(frozen=True)
class RecordedLoad:
    """Recorded steps of one load.

    Attributes:
        rate: acceptance rate of each drafted token of a chain.
        steps: by tree size in nodes; 0: without a draft, 1: draft admitted, no tree.
        backfill_row: seconds of a backfilled row.
        drain_cost: extra seconds of the first autoregressive step after a step with a tree.
    """

    clients: int
    length: float
    rate: float
    steps: Mapping[int, Sequence[Row]]
    backfill_row: float
    drain_cost: float

    @property
    def best_size(self) -> int:
        """The tree size with the most tokens per second, as recorded."""
        return max(self.steps, key=self._recorded_speed)

    def _recorded_speed(self, size: int) -> float:
        rows = self.steps[size]
        return sum(row["tokens"] for row in rows) / sum(row["us"] for row in rows)


def loads_of(file: Path) -> list[RecordedLoad]:
    """Return the loads of one recording."""
    runs: dict[tuple[int, float, bool, tuple[int, ...]], list[Row]] = {}
    chain = 0
    with gzip.open(file, "rt") as stream:
        data = json.load(stream)
    for trace in data["traces"]:
        rows: list[Row] = [dict(zip(data["fields"], row, strict=True)) for row in trace["steps"]]
        chain = trace["chain"]
        key = trace["clients"], trace["length"], trace["admits"], tuple(trace["trees"])
        runs[key] = _without_ramp(rows, trace["clients"])
    found = []
    for clients, length in dict.fromkeys((c, n) for c, n, _, trees in runs if trees[0] > 1):
        steps = {0: runs[clients, 1.0, False, (1,)], 1: runs[clients, 1.0, True, (1,)]}
        for (c, n, _, trees), rows in runs.items():
            if (c, n) == (clients, length) and trees[0] > 1:
                steps[trees[0]] = rows
        turns = [rows for (c, _, _, trees), rows in runs.items() if len(trees) > 1 and c == clients]
        rate = acceptance_rate(length, chain) if length > 1 else 0.0
        found.append(RecordedLoad(clients, length, rate, steps, *_change_costs(turns[0], steps)))
    return found


def _without_ramp(rows: Sequence[Row], clients: int) -> list[Row]:
    ramp_us = 1e6 * (_RAMP_S if clients >= _CROWD else _LEAST_RAMP_S)
    passed = np.cumsum([row["us"] for row in rows])
    return [row for row, us in zip(rows, passed, strict=True) if us > ramp_us]


def _pure(rows: Sequence[Row], size: int) -> list[int]:
    return [r["us"] for r in rows if r["tree"] == size and r["batch"] and not r["prompt_rows"]]


def _change_costs(turns: Sequence[Row], steps: Mapping[int, Sequence[Row]]) -> tuple[float, float]:
    """Return ``backfill_row`` and ``drain_cost`` of a load. ``turns``: its alternating run."""
    wide = max(steps)
    usual, alone = median(_pure(steps[wide], wide) or [0]), median(_pure(steps[1], 1))
    late = [r for r in turns if r["backfilled"] and not r["prompt_rows"] and r["tree"] == wide]
    more = [max(r["us"] - usual, 0.0) for r in late]
    each = median(m / r["backfilled"] for m, r in zip(more, late, strict=True)) if late else 14.0
    after = [
        r["us"] - alone
        for before, r in pairwise(turns)
        if before["tree"] == wide and r["tree"] == 1 and not r["prompt_rows"]
    ]
    return 1e-6 * each, 1e-6 * max(median(after) if after else 0.25 * alone, 0.0)


@dataclass
class Replay:
    """The result of a replay, without its first ``skip`` seconds.

    Attributes:
        sizes: number of steps by tree size.
    """

    seconds: float = 0.0
    tokens: int = 0
    sizes: dict[int, int] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class _Clients:
    """Sequences of a closed loop: whether each has a draft, and how many tokens it still needs."""

    def __init__(self, load: RecordedLoad, policy: Policy, chance: np.random.Generator) -> None:
        self._clients, self._policy, self._chance = load.clients, policy, chance
        self.drafting = np.array([self._admits() for _ in range(load.clients)])
        self.left = chance.integers(1, _ANSWER_TOKENS[1], load.clients).astype(np.float64)
        self.deferred = np.zeros(load.clients)

    def _admits(self) -> bool:
        size = self._clients
        return self._policy.should_draft(BatchState(size, size, size))

    def advance(self, tokens: int, *, drafted: bool) -> None:
        """All sequences emit the same number of tokens; finished ones are replaced."""
        each = tokens / self._clients
        self.left -= each
        waits = np.minimum(self.deferred + each, _MAX_DEFERRED)
        self.deferred = np.where(self.drafting & (not drafted), waits, 0.0)
        for i in np.flatnonzero(self.left <= 0):
            self.left[i] = self._chance.integers(*_ANSWER_TOKENS)
            self.drafting[i], self.deferred[i] = self._admits(), 0.0


def replay(load: RecordedLoad, policy: Policy, *, seconds: float, skip: float) -> Replay:
    """Replay ``load`` for ``seconds``. The first ``skip`` seconds do not count."""
    chance, done, now, last = np.random.default_rng(1), Replay(), 0.0, 1
    clients = _Clients(load, policy, chance)
    rows = {size: cycle(steps) for size, steps in load.steps.items()}
    while now < seconds:
        share = float(clients.drafting.mean())
        row = next(rows[1 if chance.random() < share else 0])
        batch = _batch_of(row, share)
        tree = policy.choose(batch) if row["batch"] else None
        late = 0
        if tree is not None:
            row = next(rows[tree.num_nodes])
            batch = _batch_of(row, share)
            late = round(float(clients.deferred.sum()))
        taken = 1e-6 * row["us"]
        taken += load.backfill_row * late
        if tree is None and last > 1:
            taken += load.drain_cost
        accepted = _accepted(batch, tree.num_nodes - 1 if tree else 0, load.rate, chance)
        stats = StepStats(batch, tree, accepted, taken, row["prompt_rows"], late)
        if row["batch"]:
            policy.record(stats)
            clients.advance(stats.num_tokens, drafted=tree is not None)
            last = stats.num_nodes
        now += taken
        if now >= skip:
            done.seconds += taken
            done.tokens += stats.num_tokens
            done.sizes[last] = done.sizes.get(last, 0) + 1
    return done


def _batch_of(row: Row, share: float) -> BatchState:
    size = row["batch"]
    return BatchState(size, round(share * size), size + row["prefilling"])


def _accepted(
    batch: BatchState, chain: int, rate: float, chance: np.random.Generator
) -> list[int | None]:
    """Levels that each sequence accepts of a ``chain``; None for those that do not draft."""
    if not chain:
        return [None] * batch.size
    right = chance.random((batch.num_drafting, chain)) < rate
    levels: list[int | None] = [*right.cumprod(1).sum(1).tolist()]
    return [None] * (batch.size - batch.num_drafting) + levels


def prime(policy: Policy, load: Sequence[RecordedLoad], prompt_row: float) -> None:
    """Prime ``policy`` with a server's start measurements: step costs, seconds of a prompt row."""
    for one in load:
        if one.rate:  # step costs are the same for all lengths
            continue
        for size, rows in one.steps.items():
            alone = [r for r in rows if r["batch"] and not r["prompt_rows"] and not r["backfilled"]]
            if size and len(alone) >= 10:
                batch = round(median(r["batch"] for r in alone))
                for tree in policy.trees_at(1):
                    if (tree.num_nodes if tree else 1) == size:
                        policy.prime(tree, batch, 1e-6 * median(r["us"] for r in alone))
    policy.prime_prompts(1000, 1000 * prompt_row)


def make_policy(load: RecordedLoad) -> SpeculationPolicy:
    """Return the policy of a chain, restricted to the recorded trees."""
    trees = candidates_of(SpeculationConfig(mode="chain", steps=max(load.steps) - 1))
    return SpeculationPolicy([c for c in trees if c.num_nodes in load.steps])


def fixed_policy(size: int) -> FixedPolicy:
    """Return the fixed policy of recorded steps of ``size``; 0: without a draft."""
    if not size:
        return NoDraft(None)
    return FixedPolicy(shrunk(SpeculationConfig(mode="chain", steps=max(size - 1, 1)), size))


class NoDraft(FixedPolicy):
    """A policy that runs the draft over no prompt."""

    def should_draft(self, _batch: BatchState) -> bool:
        """Return False."""
        return False


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--seconds", default=60.0, show_default=True, help="Seconds of each load.")
@click.option("--skip", default=20.0, show_default=True, help="First seconds that do not count.")
@click.option("--prompt-row-us", default=21.0, show_default=True, help="Microseconds per row.")
def main(files: Sequence[Path], seconds: float, skip: float, prompt_row_us: float) -> None:
    """Replay the loads of FILES."""
    table = Table(
        "clients", "length", "to autoregressive", "to the best fixed", "steps by tree size"
    )
    for load, loads in ((one, found) for found in map(loads_of, files) for one in found):
        policy = make_policy(load)
        prime(policy, loads, 1e-6 * prompt_row_us)
        found = replay(load, policy, seconds=seconds, skip=skip)
        fixed = {
            size: replay(load, fixed_policy(size), seconds=seconds / 2, skip=0.0).speed
            for size in {0, load.best_size}
        }
        table.add_row(
            str(load.clients), f"{load.length:g}", f"{found.speed / fixed[0]:.3f}",
            f"{found.speed / max(fixed.values()):.3f}", str(dict(sorted(found.sizes.items()))),
        )  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    run_command(main)
