"""Speculation against none where prompts are prefilled beside cycles, and where cycles take longer
than they were primed: on simulated servers, tokens per second over those of the same clients served
plainly.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.decode.simulated_load import (
    CycleMs,
    PromptLoad,
    busy_ms,
    h200_ms,
    idle_ms,
    rate_of,
    waiting_ms,
)
from tests.decode.simulated_plan import CHAIN, primed
from tests.decode.simulated_prompts import over_plain
from trt_eagle3.decode.following import Following
from trt_eagle3.decode.load_cost import LoadCosts
from trt_eagle3.decode.plan import Plan, shrunk

BOUND = 0.98
LEARNING = 100

HOST: dict[str, Any] = {"forward_ms": 3.0, "prompt_ms": 0.5}
"""A forward of prompts of the tiny pair: its host takes most of it."""


def depths_of(
    plan: Any, size: int, rate: float, ms: CycleMs, cycles: int, **load: Any
) -> list[int]:
    return PromptLoad(plan, size, rate, ms, **load).run(cycles).depths


@pytest.mark.parametrize("answer", [12, 54, 400])
def test_chain_that_a_busy_host_makes_dear_is_given_up(answer: int) -> None:
    """As with 128 clients on an H200 (2026-11-26): primed, a chain of 5 gains; served, it takes 2.9
    times as long, and a plain cycle 1.9 times, which only serving one shows. The draft is known to
    be right: chains are drafted from the first cycle on. Answers of 54 tokens: prompts come beside
    half of these cycles.
    """
    rate, load = rate_of(4.7, 5), HOST | {"answer": answer, "riding": 0.2 / 0.93}
    phases = [(busy_ms, LEARNING, 1000)]
    assert over_plain(Plan({1: shrunk(CHAIN, 6)}), 8, rate, phases, **load)[0] < 0.9
    assert over_plain(primed(idle_ms, rate=0.93), 8, rate, phases, **load)[0] >= BOUND


FOLLOWING_MS = 2.0
"""Of a prompt, for a busy host to launch the tiny pair's draft over it (H200, 2026-11-26)."""


def with_dear_following(size: int, answer: int, length: float) -> float:
    """From the 400th cycle on: a trial is borne by then, without which the draft is unseen."""
    load = HOST | {"answer": answer, "draft_ms": FOLLOWING_MS}
    plan, phases = primed(idle_ms), [(busy_ms, 400, 800)]
    return over_plain(plan, size, rate_of(length, 5), phases, **load)[0]


@pytest.mark.parametrize("length", [1.0, 2.0, 4.7])
@pytest.mark.parametrize("answer", [12, 54, 400])
@pytest.mark.parametrize("size", [8, 32, 64])
def test_prompts_are_followed_only_where_that_pays(size: int, answer: int, length: float) -> None:
    """On a busy host, where the draft takes as long over a prompt as plain cycles do."""
    assert with_dear_following(size, answer, length) >= BOUND


def test_plan_that_takes_nothing_for_following_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadCosts, "followed", lambda *args: args[2])
    monkeypatch.setattr(Following, "settle", lambda *_: None)
    assert with_dear_following(32, 54, 2.0) < 0.9


def test_plan_that_hopes_for_ever_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trial is borne, and what costs would be at best seems worth following."""
    monkeypatch.setattr(Following, "settle", lambda *_: None)
    assert with_dear_following(64, 400, 2.0) < 0.96


@pytest.mark.parametrize(
    ("size", "answer", "gain"), [(32, 400, 1.3), (64, 54, 1.03), (64, 400, 2.0)]
)
def test_draft_that_pays_though_following_is_dear_is_drafted(
    size: int, answer: int, gain: float
) -> None:
    assert with_dear_following(size, answer, 4.7) >= gain


@pytest.mark.parametrize("seed", [0, 1])
def test_draft_that_nobody_has_seen_is_followed_until_it_was_tried(seed: int) -> None:
    """A trial is borne after some hundred cycles only: catching up has become dear by then."""
    load = HOST | {"answer": 54, "draft_ms": 0.25, "seed": seed}
    phases = [(busy_ms, LEARNING, 800)]
    assert over_plain(primed(idle_ms), 32, rate_of(4.7, 5), phases, **load)[0] >= 1.3


def test_chain_that_pays_on_a_busy_host_is_kept() -> None:
    """Everything takes twice as long: plain decoding is tried, and seldom."""
    rate = rate_of(3.0)

    def twice_ms(batch: int, depth: int) -> float:
        return 2.0 * h200_ms(batch, depth)

    load, phases = {"answer": 64, "prompt_ms": 10.0}, [(twice_ms, LEARNING, 800)]
    (best,) = over_plain(Plan({1: shrunk(CHAIN, 4)}), 32, rate, phases, **load)
    assert best > 1.15
    assert over_plain(primed(h200_ms, rate), 32, rate, phases, **load)[0] > 0.97 * best
    depths = depths_of(primed(h200_ms, rate), 32, rate, twice_ms, 900, **load)
    assert depths.count(0) <= 24


@pytest.mark.parametrize("length", [1.5, 2.0, 3.0])
@pytest.mark.parametrize(
    ("size", "answer", "at_once"), [(8, 12, 1), (32, 32, 1), (32, 12, 4), (128, 32, 4)]
)
def test_loads_that_prompts_bound_are_not_served_slower(
    size: int, answer: int, at_once: int, length: float
) -> None:
    """Prompts wait for each other's forwards, in which plain steps ride: a tree saves steps that
    cost next to nothing.
    """
    rate = rate_of(length)
    load = {"answer": answer, "at_once": at_once, "prompt_ms": 5.0}
    found = over_plain(primed(h200_ms), size, rate, [(h200_ms, LEARNING, 700)], **load)
    assert found[0] >= BOUND


def test_plan_that_takes_no_step_for_riding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadCosts, "_saved", lambda *_: 0.0)
    rate = rate_of(3.0)
    phases = [(h200_ms, LEARNING, 400)]
    assert over_plain(primed(h200_ms), 32, rate, phases, answer=32, at_once=1)[0] < 0.9


@pytest.mark.parametrize(
    ("size", "answer", "length", "gain"),
    [(128, 128, 3.0, 1.1), (32, 128, 2.0, 1.12), (32, 128, 3.0, 1.4), (8, 32, 3.0, 1.3)],
)
def test_draft_that_pays_beside_prompts_is_drafted(
    size: int, answer: int, length: float, gain: float
) -> None:
    """Prompts come in a fifth (32 sequences) to two thirds (128) of the plain steps."""
    rate = rate_of(length)
    load = {"answer": answer, "prompt_ms": 8.0}
    found = over_plain(primed(h200_ms), size, rate, [(h200_ms, LEARNING, 600)], **load)
    assert found[0] >= gain


@pytest.mark.parametrize(("length", "gain"), [(1.0, BOUND), (2.0, BOUND), (3.0, 1.1)])
def test_burst_of_prompts_at_first_neither_loses_nor_keeps_a_draft_from_paying(
    length: float, gain: float
) -> None:
    """128 clients ask at once: few decode for some dozens of cycles, and the others wait."""
    rate, load = rate_of(length), {"forward_ms": 1.2, "prompt_ms": 11.4, "burst": True}
    phases = [(h200_ms, 0, 400)]
    assert over_plain(primed(h200_ms), 128, rate, phases, answer=136, **load)[0] >= gain


@pytest.mark.parametrize("length", [2.0, 3.0])
@pytest.mark.parametrize("answer", [54, 400])
def test_plain_decoding_that_has_become_cheap_is_found_out(answer: int, length: float) -> None:
    """A chain gains while the host delays every cycle, and loses when it does not; what plain
    cycles cost was last seen before that.
    """
    rate = rate_of(length, 5)
    phases = [(waiting_ms, 700, 300), (idle_ms, 2000, 600)]
    load = {"answer": answer, "forward_ms": 1.0, "prompt_ms": 0.5}
    before, after = over_plain(primed(idle_ms, rate), 8, rate, phases, **load)
    assert before > 1.05
    assert after >= BOUND


def test_chain_that_has_become_worth_it_is_found_out_where_the_draft_followed_nobody() -> None:
    """Cycles of those whom no draft follows say what plain decoding costs, too."""
    rate = rate_of(3.0, 5)
    phases = [(idle_ms, LEARNING, 600), (waiting_ms, 600, 600)]
    load = {"answer": 54, "forward_ms": 1.0, "prompt_ms": 0.5}
    plan = primed(idle_ms, rate)
    before, after = over_plain(plan, 8, rate, phases, **load)
    assert before >= BOUND
    assert after > 1.2
