"""Speculation against none from an engine's first cycle on: what the loss account promises, on
simulated servers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.decode.simulated_load import CycleMs, Load, dear_ms, h200_ms, moe_ms, rate_of
from tests.decode.simulated_plan import (
    BOUND_FROM,
    LENGTHS,
    adaptive,
    best_over_plain,
    primed,
    reckoned,
    served,
)
from trt_eagle3.decode.adaptive_plan import AdaptivePlan
from trt_eagle3.decode.loss_account import LossAccount
from trt_eagle3.decode.switch_cost import SwitchCosts

BOUND = 0.98
LEARNT, CYCLES = 400, 560

Begin = Callable[[CycleMs], AdaptivePlan]


@pytest.mark.parametrize("begin", [primed, reckoned])
@pytest.mark.parametrize("cycle_ms", [h200_ms, moe_ms])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_small_batches_are_never_served_slower_than_plainly_and_learn_what_pays(
    size: int, cycle_ms: CycleMs, begin: Begin
) -> None:
    for length in LENGTHS:
        found = served(begin(cycle_ms), size, length, cycle_ms, CYCLES)
        assert found.least() >= BOUND, length
        best = best_over_plain(size, rate_of(length), cycle_ms)
        assert best < 1.05 or found.late(LEARNT) >= 0.9 * best, length


@pytest.mark.parametrize("begin", [primed, reckoned])
@pytest.mark.parametrize("cycle_ms", [h200_ms, moe_ms])
@pytest.mark.parametrize("size", [32, 128])
def test_crowds_are_never_served_slower_than_plainly_and_learn_what_pays_at_once(
    size: int, cycle_ms: CycleMs, begin: Begin
) -> None:
    for length in (1.0, 1.5, 3.0):
        found = served(begin(cycle_ms), size, length, cycle_ms, 130, seed=1)
        assert found.least() >= BOUND, length
        assert found.late(BOUND_FROM) >= 0.9 * best_over_plain(size, rate_of(length), cycle_ms)


@pytest.mark.parametrize("cycle_ms", [h200_ms, moe_ms])
def test_prompts_of_a_crowd_whose_draft_does_not_pay_go_without_it(
    cycle_ms: CycleMs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over HTTP: prompts take as long as answers, and a draft that runs over them 5 % more."""

    def late() -> float:
        load = {"answer": 136, "prompt_ms": 16.0, "draft_ms": 0.8}
        return served(primed(cycle_ms), 128, 1.0, cycle_ms, 400, **load).late(150)

    assert late() >= BOUND
    monkeypatch.setattr(AdaptivePlan, "follows", lambda *_: True)
    assert late() < BOUND


@pytest.mark.parametrize(("cycle_ms", "size", "length"), [(h200_ms, 1, 1.0), (moe_ms, 2, 2.0)])
def test_worthless_draft_costs_less_and_less(cycle_ms: CycleMs, size: int, length: float) -> None:
    """What is tried again and again has a budget of its own, half a percent of the time."""
    found = served(primed(cycle_ms), size, length, cycle_ms, 2000)
    assert found.least() >= BOUND
    assert found.late(1000) >= 0.99


def test_machine_whose_costs_nobody_reckoned_is_not_served_slower_for_long() -> None:
    """Every row costs there: the first trial loses more than its advance, and no other follows."""
    for size in (1, 32):
        found = served(adaptive(), size, 1.0, dear_ms, 300)
        assert found.least(150) >= BOUND


@pytest.mark.parametrize("cycle_ms", [h200_ms, moe_ms])
def test_account_that_bears_everything_is_caught(
    cycle_ms: CycleMs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LossAccount, "balance", lambda *_: float("inf"))
    assert served(primed(cycle_ms), 2, 1.0, cycle_ms, 200).least() < BOUND


def test_mixture_taken_for_a_dense_target_is_dearer_than_its_advance() -> None:
    """The gate needs costs: those reckoned of a mixture's bytes."""
    assert (
        served(adaptive(), 8, 1.0, moe_ms, 120).least()
        < served(reckoned(moe_ms), 8, 1.0, moe_ms, 120).least()
    )


def test_dear_catching_up_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that catches up ten times as slowly as usual is asked more seldom; a plan to which
    that seems free is caught. The draft follows all, as where it nearly pays.
    """
    monkeypatch.setattr(AdaptivePlan, "follows", lambda *_: True)

    def least() -> float:
        return served(primed(h200_ms), 32, 1.0, h200_ms, 600, catch_up_ms=0.05).least()

    assert least() >= BOUND
    monkeypatch.setattr(SwitchCosts, "catch_up", lambda *_: 0.0)
    assert least() < BOUND


def test_first_cycles_are_plain_where_a_draft_would_have_to_be_right() -> None:
    """8 sequences of a mixture: two cycles of one drafted token may lose more than the advance."""
    load = Load(primed(moe_ms), 8, rate_of(3.0), moe_ms, noise=0.0, hiccups=0.0).run(120)
    first = next(i for i, depth in enumerate(load.depths) if depth)
    assert 40 <= first <= 110


def test_crowd_whose_first_drafted_cycle_was_disturbed_drafts_all_the_same() -> None:
    """It takes seven times as long as expected, which says nothing of its width."""
    load = Load(adaptive(), 128, rate_of(3.0), h200_ms, seed=2).run(60)
    assert min(load.depths[-10:]) > 0
