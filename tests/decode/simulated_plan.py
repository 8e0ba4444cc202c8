"""Adaptive plans under simulated loads: ``python -m tests.decode.simulated_plan`` prints what every
load gains from its first cycle on, over plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tests.decode.simulated_load import CycleMs, Load, chain_length, h200_ms, moe_ms, rate_of
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.adaptive_plan import AdaptivePlan
from trt_eagle3.decode.bundle_plan import acceptance_prior
from trt_eagle3.decode.cycle_cost import ExpertReads, prior_of
from trt_eagle3.decode.plan import Plan, shrunk, widths
from trt_eagle3.decode.tree import configured_tree
from trt_eagle3.decode.tuning import TuningTable

CHAIN = SpeculationConfig(mode="chain", steps=5)
DEPTHS = (0, 1, 2, 3, 5)
KV_SHARE = 9e-6
MIXTURE = ExpertReads(share=0.96, touched=8 / 128)
COSTS = {"dense 8B": h200_ms, "30B-A3B": moe_ms}
SIZES = (1, 2, 4, 8, 32, 64, 128)
LENGTHS = (1.0, 1.5, 2.0, 3.0, 4.0)
BOUND_FROM = 60  # the cycle from which on nothing is served below 0.98 of plain decoding


def adaptive(
    config: SpeculationConfig = CHAIN,
    table: TuningTable | None = None,
    experts: ExpertReads | None = None,
    rate: float | None = None,
) -> AdaptivePlan:
    """A plan that has seen nothing. ``rate``: of each token of a chain, if that is known."""
    tree = configured_tree(config)
    known = {} if rate is None else {(depth, 1): rate for depth in DEPTHS if depth}
    return AdaptivePlan(
        config,
        Plan({1: tree}),
        widths(tree.num_nodes),
        prior_of(table, KV_SHARE, experts),
        acceptance_prior(table, config) | known,
    )


def primed(cycle_ms: CycleMs, rate: float | None = None) -> AdaptivePlan:
    """A plan that has seen its graphs captured. ``rate``: as of ``adaptive``."""
    plan = adaptive(rate=rate)
    for size in (128, 64, 32, 8, 4, 2, 1):
        for depth in DEPTHS:
            read = KV_SHARE * size * 1024 * cycle_ms(1, 0)
            tree = shrunk(CHAIN, depth + 1)
            plan.prime(tree, size, (cycle_ms(size, depth) - read) / 1000)
    return plan


def reckoned(cycle_ms: CycleMs) -> AdaptivePlan:
    """A plan that knows the bytes that its target reads, and no measured cost."""
    return adaptive(experts=MIXTURE if cycle_ms is moe_ms else None)


def best_over_plain(size: int, rate: float, cycle_ms: CycleMs) -> float:
    """Tokens per second of the best width over plain ones, had it been known."""
    plain = cycle_ms(size, 0)
    return max(chain_length(rate, d) * plain / cycle_ms(size, d) for d in DEPTHS)


@dataclass(frozen=True)
class Served:
    """What was served up to the end of every cycle: in ``seconds``, and what it would have taken
    plainly.
    """

    seconds: Sequence[float]
    worth: Sequence[float]

    def over_plain(self, cycles: int) -> float:
        """Of the first ``cycles``."""
        return self.worth[cycles - 1] / self.seconds[cycles - 1]

    def least(self, start: int = BOUND_FROM) -> float:
        """The least of ``over_plain`` from ``start`` cycles on."""
        return min(self.over_plain(n) for n in range(start, len(self.seconds) + 1))

    def late(self, start: int) -> float:
        """Of all cycles after ``start``."""
        return (self.worth[-1] - self.worth[start - 1]) / (
            self.seconds[-1] - self.seconds[start - 1]
        )


def served(
    plan: Any, size: int, length: float, cycle_ms: CycleMs, cycles: int, **load: Any
) -> Served:
    """``size`` sequences under ``plan`` from its first cycle on, without noise. ``length``: the
    acceptance length of a chain of 3.
    """
    run = Load(plan, size, rate_of(length), cycle_ms, noise=0.0, hiccups=0.0, **load)
    seconds, worth = [], []
    for _ in range(cycles):
        run.run(1)
        seconds.append(run.seconds)
        worth.append(run.worth)
    return Served(seconds, worth)


def main(cycles: int = 2000, seeds: int = 1) -> None:
    """Print the least over ``seeds`` runs of every load, by what is known of costs at first."""
    ends = [60, 120, 400, 2000]
    print("costs, known | B | length |", *ends, "| least from 60 | after 400 (mean) | best")
    for (name, cycle_ms), begin in product(COSTS.items(), (primed, reckoned)):
        for size, length in product(SIZES, LENGTHS):
            runs = [
                served(begin(cycle_ms), size, length, cycle_ms, cycles, seed=seed)
                for seed in range(seeds)
            ]
            at = [f"{min(r.over_plain(n) for r in runs):.3f}" for n in ends if n <= cycles]
            least = min(r.least() for r in runs)
            late = sum(r.late(400) for r in runs) / seeds
            best = best_over_plain(size, rate_of(length), cycle_ms)
            row = (f"{name}, {begin.__name__}", size, length, " ".join(at), f"{least:.3f}")
            print(*row, f"{late:.2f}", f"{best:.2f}", sep=" | ", flush=True)


if __name__ == "__main__":
    main()
