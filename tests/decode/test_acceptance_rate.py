"""Acceptance by level: what was observed, over a prior, of all sequences and of each."""

from __future__ import annotations

import random

import pytest

from tests.decode.simulated_load import Sequence, chain_length
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.acceptance_rate import AcceptanceRates, SequenceRates, levels_of
from trt_eagle3.decode.dynamic_tree import DynamicTree
from trt_eagle3.decode.tree import Tree, static_tree

CHAIN = levels_of(static_tree(SpeculationConfig(mode="chain", steps=4)))


def test_levels_of_trees_are_depths_and_siblings_on_the_likeliest_path() -> None:
    assert levels_of(None) == ()
    assert CHAIN == ((1, 1), (2, 1), (3, 1), (4, 1))
    bushy = Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])
    assert levels_of(bushy) == ((1, 3), (2, 2))
    assert levels_of(DynamicTree(3, 4, 10)) == ((1, 3), (2, 3), (3, 3))


def draw(rate: float, chance: random.Random) -> int:
    count = 0
    while count < len(CHAIN) and chance.random() < rate:
        count += 1
    return count


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rates_come_near_the_truth_at_every_level(rate: float) -> None:
    found, chance = AcceptanceRates({}), random.Random(1)
    for _ in range(400):
        found.observe(CHAIN, [draw(rate, chance) for _ in range(8)])
    for level in CHAIN[: 2 if rate < 0.5 else 4]:
        assert found.rate(level) == pytest.approx(rate, abs=0.07)


def test_unobserved_depth_has_the_rate_of_the_level_above() -> None:
    found = AcceptanceRates({})
    for _ in range(200):
        found.observe(CHAIN[:1], [0, 0, 0, 1])
    assert found.rate((2, 1)) == pytest.approx(found.rate((1, 1)))
    assert found.rate((1, 1)) == pytest.approx(0.25, abs=0.03)


def test_more_siblings_hold_the_token_more_often() -> None:
    found = AcceptanceRates({})
    for _ in range(200):
        found.observe([(1, 2)], [0, 1])
    assert found.rate((1, 1)) < found.rate((1, 2)) < found.rate((1, 4)) < 1.0


def test_prior_counts_until_observations_outweigh_it() -> None:
    found = AcceptanceRates({(1, 1): 0.9})
    assert found.rate((1, 1)) == pytest.approx(0.9)
    for _ in range(100):
        found.observe(CHAIN, [0])
    assert found.rate((1, 1)) < 0.1
    for _ in range(2000):
        found.fade(0.01)
    assert found.rate((1, 1)) == pytest.approx(0.9, abs=0.01)


def test_sequences_differ_from_each_other_and_new_ones_are_like_all() -> None:
    overall, own = AcceptanceRates({}), SequenceRates(CHAIN)
    good, bad, new = (Sequence(10, 0.0) for _ in range(3))
    for _ in range(60):
        overall.observe(CHAIN, [4, 0])
        own.observe(CHAIN, [good, bad], [4, 0])
    tokens = {s: own.expected_tokens([CHAIN], [s], overall)[0] for s in (good, bad, new)}
    assert tokens[good] > 4.0
    assert tokens[bad] < 1.5
    assert tokens[bad] < tokens[new] < tokens[good]
    together = own.expected_tokens([(), CHAIN[:2], CHAIN], [good, bad, new], overall)
    assert together[0] == 3
    assert together[2] == pytest.approx(sum(tokens.values()))
    assert together[0] < together[1] < together[2]


def test_thousands_of_sequences_leave_no_memory_behind() -> None:
    overall, own = AcceptanceRates({}), SequenceRates(CHAIN)
    kept = Sequence(10, 0.0)
    for _ in range(50):
        own.observe(CHAIN, [kept], [4])
        own.observe(CHAIN, [Sequence(10, 0.0) for _ in range(64)], [0] * 64)
    assert own._counts.shape[1] == 512
    assert own.expected_tokens([CHAIN], [kept], overall)[0] > chain_length(0.8, 4)


def test_most_and_least_tokens_close_in_on_what_is_expected() -> None:
    found = AcceptanceRates({})
    margins = []
    for _ in range(3):
        least, most = found.least_tokens(CHAIN), found.most_tokens(CHAIN)
        assert least < found.expected_tokens(CHAIN) < most
        margins.append(most - least)
        for _ in range(20):
            found.observe(CHAIN, [0, 1, 2, 4])
    assert margins == sorted(margins, reverse=True)
    assert margins[-1] < 0.3 * margins[0]


def test_draft_that_was_never_right_promises_little_at_any_depth() -> None:
    """Levels that nothing ever came to count by what comes to them."""
    found = AcceptanceRates({})
    found.observe(CHAIN, [0] * 64)
    assert found.most_tokens(CHAIN) < 1.1
