"""What it costs to begin and to stop drafting."""

from __future__ import annotations

import pytest

from trt_eagle3.decode.switch_cost import SwitchCosts

ONE = 0.004


def test_catch_up_costs_nothing_without_rows_and_more_with_more() -> None:
    found = SwitchCosts()
    assert found.catch_up(0, ONE) == 0.0
    assert 0.0 < found.catch_up(1, ONE) < found.catch_up(100, ONE) < found.catch_up(1000, ONE)


def test_catch_up_follows_what_was_observed() -> None:
    found = SwitchCosts()
    for _ in range(30):
        found.observe_catch_up(100, 0.002, ONE)
    assert found.catch_up(100, ONE) == pytest.approx(0.002, rel=0.01)


def test_one_allocation_makes_no_draft_too_dear_for_ever() -> None:
    found = SwitchCosts()
    usual = found.catch_up(100, ONE)
    found.observe_catch_up(100, 100 * usual, ONE)
    assert found.catch_up(100, ONE) <= 2 * usual


def test_turn_follows_what_was_observed_and_is_never_negative() -> None:
    found = SwitchCosts()
    for _ in range(40):
        found.observe_turn(0.0004, ONE)
    assert found.turn(ONE) == pytest.approx(0.0004, rel=0.01)
    for _ in range(40):
        found.observe_turn(-1.0, ONE)
    assert found.turn(ONE) == pytest.approx(0.0, abs=1e-6)


def test_catch_up_takes_what_was_measured_ahead_whatever_a_cycle_takes() -> None:
    found = SwitchCosts()
    for num_rows, seconds in ((400, 0.0045), (1, 0.0025), (100, 0.0027), (100, 0.0035)):
        found.prime_catch_up(num_rows, seconds)
    assert found.catch_up(0, ONE) == 0.0
    for one in (ONE, 2 * ONE):
        assert found.catch_up(1, one) == pytest.approx(0.0025)
        assert found.catch_up(100, one) == pytest.approx(0.0035), "the longest of as many rows"
        assert found.catch_up(250, one) == pytest.approx(0.004)
        assert found.catch_up(700, one) == pytest.approx(0.0055), "beyond the last as steeply"


def test_catch_up_follows_what_was_observed_also_where_it_was_measured() -> None:
    found = SwitchCosts()
    found.prime_catch_up(100, 0.002)
    for _ in range(30):
        found.observe_catch_up(100, 0.005, ONE)
    assert found.catch_up(100, ONE) == pytest.approx(0.005, rel=0.01)
