"""Speculation against none where prompts are prefilled beside cycles: on simulated servers, tokens
per second over those of the same clients served plainly.
"""

from __future__ import annotations

import pytest

from tests.decode.simulated_load import (
    h200_ms,
    rate_of,
)
from tests.decode.simulated_plan import primed
from tests.decode.simulated_prompts import over_plain
from trt_eagle3.decode.load_cost import LoadCosts

BOUND = 0.98
LEARNING = 100


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
