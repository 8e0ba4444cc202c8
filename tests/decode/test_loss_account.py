"""What speculation may lose."""

from __future__ import annotations

import pytest

from trt_eagle3.decode.loss_account import LossAccount

PLAIN = 0.01


def test_a_cycle_may_be_lost_before_anything_was_served() -> None:
    assert LossAccount().balance(PLAIN) == pytest.approx(PLAIN)


def test_cycles_that_lose_exhaust_it_and_plain_ones_earn_half_a_percent() -> None:
    account = LossAccount()
    for _ in range(4):
        account.settle(1.3 * PLAIN, PLAIN, PLAIN)
    assert account.balance(PLAIN) == 0.0
    for _ in range(100):
        account.earn(PLAIN, PLAIN)
    assert account.balance(PLAIN) == pytest.approx(0.3 * PLAIN)


def test_what_was_won_pays_for_two_cycles_at_most() -> None:
    account = LossAccount()
    for _ in range(100):
        account.settle(PLAIN, 3 * PLAIN, PLAIN)
    assert account.balance(PLAIN) == pytest.approx(2 * PLAIN)


def test_one_disaster_is_forgotten_in_time() -> None:
    account = LossAccount()
    account.settle(1.0, PLAIN, PLAIN)
    for _ in range(500):
        account.earn(PLAIN, PLAIN)
    assert account.balance(PLAIN) == pytest.approx(0.5 * PLAIN)
