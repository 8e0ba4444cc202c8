"""The policy: what it serves at first, what makes it change, what it never does."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.policy.candidate import candidates_of
from trt_eagle3.decode.policy.protocol import BatchState, FixedPolicy, StepStats
from trt_eagle3.decode.policy.speculation import SpeculationPolicy
from trt_eagle3.decode.speculation.tree import AnyTree, configured_tree

CHAIN = SpeculationConfig(mode="chain", steps=3)
ONE = BatchState(1, 1, 1)
MS = {1: 4.0, 2: 4.8, 3: 5.0, 4: 5.1}
"""Of steps of one sequence, by tree size: an 8B pair on an H200."""


def policy_of(ms: dict[int, float] = MS) -> SpeculationPolicy:
    policy = SpeculationPolicy(candidates_of(CHAIN))
    for tree in policy.trees_at(1):
        policy.prime(tree, 1, 1e-3 * ms[tree.num_nodes if tree else 1])
    return policy


def serve(
    policy: SpeculationPolicy,
    rate: float,
    steps: int,
    ms: Callable[[int], float] = MS.__getitem__,
    batch: BatchState = ONE,
) -> list[AnyTree | None]:
    """Trees of ``steps`` steps, each drafted token of which is accepted at ``rate``."""
    chance, served = random.Random(0), list[AnyTree | None]()
    for _ in range(steps):
        tree = policy.choose(batch)
        accepted: list[int | None] = []
        for _ in range(batch.size):
            count = 0
            while tree is not None and count < tree.depth and chance.random() < rate:
                count += 1
            accepted.append(count if tree else None)
        nodes = tree.num_nodes if tree else 1
        policy.record(StepStats(batch, tree, accepted, 1e-3 * ms(nodes)))
        served.append(tree)
    return served


def share(trees: list[AnyTree | None], size: int) -> float:
    return sum((t.num_nodes if t else 1) == size for t in trees) / len(trees)


def test_engine_that_knows_nothing_begins_by_drafting() -> None:
    policy = SpeculationPolicy(candidates_of(CHAIN))
    assert policy.needs_costs
    assert policy.choose(BatchState(1, 1, 1)) is not None
    assert policy.should_draft(BatchState(1, 1, 1))


@pytest.mark.parametrize(("rate", "size"), [(0.8, 4), (0.0, 1)])
def test_best_tree_is_served_nearly_always(rate: float, size: int) -> None:
    policy = policy_of()
    serve(policy, rate, 100)
    assert share(serve(policy, rate, 4000), size) > 0.97


def test_draft_that_costs_speak_against_is_tried_and_served_where_it_gains() -> None:
    """Three times as dear as none: it pays only because it is right more often than expected."""
    dear = {1: 4.0, 2: 8.0, 3: 10.4, 4: 12.0}
    policy = policy_of(dear)
    assert policy.should_draft(ONE)
    found = serve(policy, 1.0, 4000, dear.__getitem__)
    assert share(found[-1000:], 4) > 0.9


def test_draft_that_becomes_right_again_is_found() -> None:
    policy = policy_of()
    serve(policy, 0.0, 2000)
    assert share(serve(policy, 0.0, 500), 1) > 0.97
    found = serve(policy, 0.8, 20_000)
    assert share(found[-2000:], 4) > 0.97


def test_trees_that_cost_more_than_measured_at_start_are_given_up() -> None:
    policy = policy_of()
    found = serve(policy, 0.6, 3000, lambda nodes: 4.0 if nodes == 1 else 12.0)
    assert share(found[-1000:], 1) > 0.97


def test_loss_against_autoregressive_steps_stays_within_the_account() -> None:
    """Acceptance that turns bad as soon as the draft is in use, over and over."""
    policy, lost, emitted = policy_of(), 0.0, 0
    for _ in range(40):
        for rate, steps in ((0.9, 30), (0.0, 300)):
            for tree in serve(policy, rate, steps):
                if rate == 0.0:
                    lost += MS[tree.num_nodes if tree else 1] - MS[1]
                    emitted += 1
    assert lost / (MS[1] * emitted) < 0.04


def test_sequence_without_a_draft_and_seeded_batch() -> None:
    policy = policy_of()
    serve(policy, 0.0, 500)
    assert policy.choose(BatchState(2, 0, 2)) is None
    seeded = BatchState(2, 1, 2, seeded=True)
    assert policy.choose(seeded) == configured_tree(CHAIN), "whatever was learnt"
    assert policy.should_draft(seeded)


def test_new_prompts_get_no_draft_where_none_pays_until_it_is_tried_again() -> None:
    policy, batch = policy_of(), BatchState(1, 1, 1)
    serve(policy, 0.0, 100)
    asked = [policy.should_draft(batch)]
    for _ in range(20_000):
        policy.record(StepStats(BatchState(1, 0, 1), None, [None], 0.004))
        asked.append(policy.should_draft(batch))
    assert not any(asked[:200])
    assert asked[-1]


def test_trees_to_capture_begin_with_the_most_promising() -> None:
    policy = policy_of()
    assert next(t.num_nodes if t else 1 for t in policy.trees_at(1)) == 4
    serve(policy, 0.0, 100)
    assert policy.trees_at(1)[0] is None
    assert len(policy.trees_at(1)) == 4


def test_fixed_policy_serves_its_tree_whatever_happens() -> None:
    tree = configured_tree(CHAIN)
    policy = FixedPolicy(tree)
    assert policy.choose(BatchState(3, 1, 3)) is tree
    assert policy.choose(BatchState(3, 0, 3)) is None
    assert not FixedPolicy(None).speculates
