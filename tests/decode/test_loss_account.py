"""What speculation may lose."""

from __future__ import annotations

import pytest

from trt_eagle3.decode.loss_account import LossAccount

PLAIN = 0.01


def account(share: float = 0.02, advance: float = 1.0, most: float = 4.0) -> LossAccount:
    return LossAccount(share, advance, most)


def test_balance_before_any_cycle_is_the_advance() -> None:
    assert account().balance(PLAIN) == pytest.approx(PLAIN)
    assert account(advance=0.0).balance(PLAIN) == 0.0


def test_plain_cycles_repay_the_advance_before_they_earn_a_share() -> None:
    found = account()
    for _ in range(50):
        found.settle(PLAIN, PLAIN, PLAIN)
    assert found.balance(PLAIN) == pytest.approx(PLAIN)
    for _ in range(50):
        found.settle(PLAIN, PLAIN, PLAIN)
    assert found.balance(PLAIN) == pytest.approx(2 * PLAIN)


@pytest.mark.parametrize("advance", [0.0, 1.0])
def test_worth_never_falls_below_its_share_where_only_what_is_borne_is_lost(advance: float) -> None:
    """Whoever loses all that the balance bears, again and again, reaches the bound and no less."""
    found, spent, worth = account(advance=advance), 0.0, 0.0
    ratios = []
    for cycle in range(1, 1001):
        loses = found.balance(PLAIN) >= 0.5 * PLAIN
        seconds = 1.5 * PLAIN if loses else PLAIN
        found.settle(seconds, PLAIN, PLAIN)
        spent, worth = spent + seconds, worth + PLAIN
        if cycle >= 50 * advance:
            ratios.append(worth / spent)
    assert min(ratios) >= 0.98
    assert ratios[-1] <= 0.981


def test_what_was_won_pays_for_a_few_cycles_at_most() -> None:
    found = account()
    for _ in range(100):
        found.settle(PLAIN, 3 * PLAIN, PLAIN)
    assert found.balance(PLAIN) == pytest.approx(4 * PLAIN)


def test_one_disaster_is_forgotten_in_time() -> None:
    found = account(advance=0.0)
    found.settle(1.0, PLAIN, PLAIN)
    assert found.balance(PLAIN) == 0.0
    for _ in range(250):
        found.settle(PLAIN, PLAIN, PLAIN)
    assert found.balance(PLAIN) == pytest.approx(PLAIN)
