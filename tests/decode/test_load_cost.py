"""Plain steps that ride with prompts: what they cost, and what a tree's cycle is worth there."""

from __future__ import annotations

import pytest

from tests.decode.simulated_load import Sequence
from tests.decode.simulated_plan import CHAIN
from trt_eagle3.decode.cycle_cost import CycleCosts, Shape, prior_of
from trt_eagle3.decode.load_cost import LoadCosts
from trt_eagle3.decode.plan import Cycle, shrunk

ONE, PLAIN, MANY = (Shape(1, 0, size, 0.0) for size in (1, 8, 16))
TREE = Shape(6, 5, 8, 0.0)
SEQUENCES = [Sequence(100, 0.5) for _ in range(8)]


def costs() -> CycleCosts:
    """Plain cycles of 1, 8 and 16 take 4, 5 and 6 ms, one over 8 trees 9 ms."""
    found = CycleCosts(prior_of(None, 0.0))
    for shape, seconds in ((ONE, 0.004), (PLAIN, 0.005), (MANY, 0.006), (TREE, 0.009)):
        found.prime(shape.num_nodes, shape.batch_size, seconds)
    return found


def cycle(tokens: int, joining: int, seconds: float | None = None, following: float = 0.0) -> Cycle:
    """One in which each sequence emitted so many."""
    tree = shrunk(CHAIN, 6) if tokens > 1 else None
    accepted = [tokens - 1 if tree else None] * 8
    return Cycle(SEQUENCES, tree, accepted, 0, seconds, joining, following)  # type: ignore[arg-type]


def loaded(*cycles: Cycle) -> LoadCosts:
    """After many times ``cycles``."""
    found = LoadCosts(costs())
    for _ in range(600):
        for each in cycles:
            found.observe(each)
    return found


def worth(tokens: int, joining: int, seconds: float | None = None) -> float:
    return LoadCosts(costs()).worth(cycle(tokens, joining, seconds), PLAIN)


def test_without_prompts_costs_are_those_of_cycles_alone() -> None:
    found, alone = loaded(cycle(1, 0), cycle(3, 0)), costs()
    for shape in (ONE, PLAIN, TREE):
        assert found.seconds(shape) == alone.seconds(shape)
        assert found.is_known(shape) == alone.is_known(shape)
        assert found.doubt(shape) == alone.doubt(shape)
    assert found.instead(PLAIN, 3.0) == pytest.approx(3 * 0.005)
    assert found.speed(TREE, 3.0) == pytest.approx(3 * 5 / 9)
    assert worth(3, 0) == pytest.approx(3 * 0.005)
    assert worth(1, 0) == pytest.approx(0.005)


def test_riding_step_costs_what_it_takes_more_than_one_sequence() -> None:
    found = loaded(cycle(1, 1))
    assert found.seconds(PLAIN) == pytest.approx(0.001, rel=0.05)
    assert found.seconds(TREE) == 0.009
    assert found.speed(PLAIN, 1.0) == 1.0
    assert worth(1, 1) == pytest.approx(0.001)


def test_riding_step_of_one_sequence_costs_something() -> None:
    assert 0.0 < loaded(cycle(1, 1)).seconds(ONE) < 0.2 * 0.004


def test_share_that_rides_is_counted_in_plain_steps_whatever_is_drafted() -> None:
    """Prompts beside every third plain step are beside each cycle of three tokens."""
    plainly = loaded(cycle(1, 1), cycle(1, 0), cycle(1, 0))
    drafted = loaded(cycle(3, 1))
    assert plainly.seconds(PLAIN) == pytest.approx(0.005 - 0.004 / 3, rel=0.02)
    assert drafted.seconds(PLAIN) == pytest.approx(plainly.seconds(PLAIN), rel=0.02)


def test_tree_beside_prompts_must_gain_the_step_that_would_have_ridden() -> None:
    assert worth(3, 1) == pytest.approx(3 * 8 / 9 * (0.005 + 0.001 / 8) - 0.004)
    assert loaded(cycle(3, 1)).speed(TREE, 3.0) < 0.8 * loaded(cycle(3, 0)).speed(TREE, 3.0)


def test_tokens_of_few_while_many_wait_are_worth_what_all_together_take_for_them() -> None:
    """8 decode and 8 wait for their prompts: 16 tokens take 6 ms."""
    assert worth(3, 8) == pytest.approx(3 * 0.006 / 2 - 0.004)
    found = loaded(cycle(3, 8))
    assert found.instead(PLAIN, 3.0) == pytest.approx(3 * (0.006 / 2 - 0.004 / 3), rel=0.02)
    assert found.seconds(PLAIN) == pytest.approx(0.005 - 0.004 / 3, rel=0.02), "of those now"


def test_no_step_rides_with_prompts_that_wait_for_a_cycle_to_be_timed() -> None:
    """It would have, were the cycle not quiet: the next ones are expected not to be."""
    assert worth(1, 8, seconds=0.005) == pytest.approx(0.005)
    assert worth(3, 8, seconds=0.009) == pytest.approx(3 * 0.006 / 2)
    found = loaded(cycle(1, 8, seconds=0.005))
    assert found.seconds(PLAIN) == pytest.approx(0.001, rel=0.05)


def test_prompts_that_have_ended_are_forgotten() -> None:
    found = loaded(cycle(1, 8))
    for _ in range(600):
        found.observe(cycle(1, 0))
    assert found.seconds(PLAIN) == pytest.approx(0.005, rel=0.02)
    assert found.instead(PLAIN, 1.0) == pytest.approx(0.005, rel=0.05)


def test_draft_that_follows_prompts_takes_what_it_was_seen_to_take() -> None:
    """2 ms in the forward beside every third plain step, of which each takes 5 - 4 / 3 ms on the
    average; 1.5 times as fast is 2.44 ms for each.
    """
    found = loaded(cycle(1, 1, following=0.002), cycle(1, 0), cycle(1, 0))
    each = 5 - 4 / 3
    assert found.followed(PLAIN, 1.5) == pytest.approx(each / (each / 1.5 + 2 / 3), rel=0.02)


def test_prompts_that_are_not_followed_cost_as_much_as_is_reckoned() -> None:
    """A quarter of the 4 ms of one sequence. What was seen before fades."""
    found = loaded(cycle(1, 1, following=0.002))
    for _ in range(4000):
        found.observe(cycle(1, 1))
    assert found.followed(PLAIN, 1.5) == pytest.approx(1 / (1 / 1.5 + 1.0), rel=0.05)


def test_without_prompts_following_costs_nothing() -> None:
    assert loaded(cycle(1, 0)).followed(PLAIN, 1.5) == 1.5


def test_first_run_of_a_shape_says_little_of_following() -> None:
    """0.3 s for a capture, in one of many forwards."""
    found, never = loaded(cycle(1, 1, following=0.001)), loaded(cycle(1, 1, following=0.001))
    found.observe(cycle(1, 1, following=0.3))
    for _ in range(20):
        found.observe(cycle(1, 1, following=0.001))
    assert found.followed(PLAIN, 2.0) == pytest.approx(never.followed(PLAIN, 2.0), rel=0.01)
