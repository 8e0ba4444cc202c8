"""Drafts that are right by chance: only benchmarks have them."""

from __future__ import annotations

import random

import pytest

from benchmarks.simulated_acceptance import (
    acceptance_length,
    acceptance_rate,
    simulated_acceptance,
)
from tests.decode.pair import NUM_PAGES, PAGE_SIZE
from tests.decode.scheduling import CHAIN, MAX_SEQ_LEN, make_scheduler, pair, prompts
from trt_eagle3.decode.memory.kv_cache import PagePool


@pytest.mark.parametrize("length", [1.0, 2.0, 3.0, 4.0])
def test_rate_of_a_length_has_that_length(length: float) -> None:
    assert acceptance_length(acceptance_rate(length, 3), 3) == pytest.approx(length)


def accepted() -> list[int]:
    """Tokens of every cycle of a few answers."""
    pool, found = PagePool(NUM_PAGES, PAGE_SIZE), list[int]()
    for index in (0, 2, 3, 6):
        scheduler = make_scheduler(pool, None, lambda _: CHAIN)
        sequence = pair().sequence(prompts()[index], pool, drafting=True)
        scheduler.add(sequence)
        while sequence.num_tokens < MAX_SEQ_LEN - 5:
            found += [len(e.tokens) for e in scheduler.step() if e.tree_depth]
        scheduler.remove(sequence)
    return found


def test_cycles_have_the_length_that_was_asked_for() -> None:
    with simulated_acceptance(1.0):
        assert set(accepted()) == {4}
    with simulated_acceptance(0.0):
        assert set(accepted()) == {1}
    with simulated_acceptance(acceptance_rate(2.0, 3), seed=random.Random(0).randint(0, 9)):
        found = accepted()
    assert sum(found) / len(found) == pytest.approx(2.0, abs=0.5)


def test_what_was_real_is_real_again() -> None:
    before = accepted()
    with simulated_acceptance(1.0):
        accepted()
    assert accepted() == before
