"""Acceptance by level: what was observed, over a prior that returns."""

from __future__ import annotations

import random

import pytest

from trt_eagle3.decode.policy.acceptance import Acceptance

CHAIN = ((1, 1), (2, 1), (3, 1), (4, 1))


def observed(rate: float, steps: int = 400) -> Acceptance:
    """Of ``steps`` steps of 8 sequences, each level accepted at ``rate``."""
    found, chance = Acceptance(), random.Random(1)
    for _ in range(steps):
        accepted = []
        for _ in range(8):
            count = 0
            while count < len(CHAIN) and chance.random() < rate:
                count += 1
            accepted.append(count)
        found.observe(CHAIN, accepted)
    return found


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rates_after_many_steps_are_near_the_truth_at_every_level(rate: float) -> None:
    found = observed(rate)
    for level in CHAIN[: 2 if rate < 0.5 else 4]:
        assert found.rate(level) == pytest.approx(rate, abs=0.07)


def test_expected_tokens_are_those_of_a_chain_of_that_rate() -> None:
    wanted = sum(0.8**depth for depth in range(5))
    assert observed(0.8).expected_tokens(CHAIN) == pytest.approx(wanted, rel=0.05)
    assert observed(0.8).expected_tokens(()) == 1.0


def test_unobserved_depth_has_the_rate_of_the_level_above() -> None:
    found = Acceptance()
    for _ in range(200):
        found.observe(CHAIN[:1], [0, 0, 0, 1])
    assert found.rate((1, 1)) == pytest.approx(0.25, abs=0.03)
    assert found.rate((2, 1)) == pytest.approx(found.rate((1, 1)))


def test_more_siblings_hold_the_token_more_often() -> None:
    found = Acceptance()
    for _ in range(200):
        found.observe([(1, 2)], [0, 1])
    assert found.rate((1, 1)) < found.rate((1, 2)) < found.rate((1, 4)) < 1.0


def test_rate_of_a_draft_that_was_never_right_returns_to_the_prior_without_observations() -> None:
    found = observed(0.0)
    assert found.rate((1, 1)) < 0.02
    found.fade(20_000)
    assert found.rate((1, 1)) == pytest.approx(Acceptance().rate((1, 1)), abs=0.05)
