"""Where a run by live cost lost time: every cycle is counted once, under what it did."""

from __future__ import annotations

import math

import pytest

from trt_eagle3.bench.width_trace import Ledger, TracedCycle, ledger

PLAIN_MS, SIZE = 4.0, 2


def cycle(
    draft_tokens: int = 0, *, tokens: int = SIZE, ms: float = PLAIN_MS, caught_up: int = 0
) -> TracedCycle:
    return TracedCycle(draft_tokens, tokens, ms, PLAIN_MS + draft_tokens, caught_up)


def test_cycles_like_those_of_a_run_without_speculation_lose_nothing() -> None:
    assert ledger([cycle()] * 5, SIZE, PLAIN_MS) == Ledger(PLAIN_MS, 0.0, 0.0, 0.0, 0.0)


def test_what_was_lost_stands_under_what_the_cycle_did() -> None:
    run = [
        cycle(ms=4.2),
        cycle(ms=4.4),
        cycle(ms=4.5),  # nothing was launched ahead of the next one
        cycle(2, ms=6.0 + 3.0, caught_up=80),
        cycle(2, ms=6.0, tokens=3 * SIZE),
        cycle(ms=5.0),
        cycle(ms=4.2),
    ]
    found = ledger(run, SIZE, PLAIN_MS)
    worth = 9 * PLAIN_MS
    assert found.plain_ms == pytest.approx(4.2)
    assert found.plain == pytest.approx(0.8 / worth)
    assert found.switching == pytest.approx(1.5 / worth)
    assert found.caught_up == pytest.approx(3.0 / worth)
    assert found.drafted == pytest.approx((2.0 - 6.0) / worth)
    assert found.total == pytest.approx((sum(c.ms for c in run) - worth) / worth)


def test_plain_cycle_in_which_a_draft_caught_up_is_not_among_the_median() -> None:
    found = ledger([cycle(), cycle(ms=7.0, caught_up=448), cycle()], SIZE, PLAIN_MS)
    assert (found.plain_ms, found.plain) == (PLAIN_MS, 0.0)
    assert found.caught_up == pytest.approx(0.25)


def test_cycles_that_were_not_timed_are_left_out() -> None:
    found = ledger([cycle(ms=math.nan), cycle(ms=5.0)], SIZE, PLAIN_MS)
    assert found.total == pytest.approx(0.25)


def test_run_without_a_plain_cycle_has_no_median_of_them() -> None:
    assert math.isnan(ledger([cycle(3)], SIZE, PLAIN_MS).plain_ms)
