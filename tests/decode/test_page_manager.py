"""Room for sequences, and for what is launched ahead of them, where the prefix cache has filled all
pages.
"""

from __future__ import annotations

import pytest

from benchmarks.full_prefix_cache import fill_with_prefixes
from tests.decode.pair import NUM_PAGES, PAGE_SIZE, Recorder
from tests.decode.scheduling import (
    MAX_SEQ_LEN,
    MAX_TOKENS,
    TREES,
    finish,
    make_scheduler,
    pair,
    solo,
)
from tests.decode.test_stepper import fixed_pool, sequence
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.page_manager import PageManager
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.memory.state import LayerStates
from trt_eagle3.decode.step.stepper import Stepper


def full_of_prefixes(num_pages: int) -> tuple[PagePool, PrefixCache]:
    """A pool of which a prefix cache keeps every page, as after an hour of serving."""
    pool = fixed_pool(num_pages)
    prefixes = PrefixCache(pool)
    fill_with_prefixes(pool, prefixes)
    assert (pool.num_free, pool.num_idle) == (0, num_pages - 1)
    return pool, prefixes


def states() -> LayerStates:
    return pair().decoder(Recorder(), MAX_SEQ_LEN).states


def rooms_found(
    tree: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[bool], dict[int, list[int]]]:
    """What forwards that are launched ahead were told, and what two sequences say that come one
    after the other.
    """
    found: list[bool] = []
    has_room = Stepper._try_reserve

    def noted(self: Stepper, s: SequenceState, num_rows: int) -> bool:
        found.append(has_room(self, s, num_rows))
        return found[-1]

    monkeypatch.setattr(Stepper, "_try_reserve", noted)
    pool, prefixes = full_of_prefixes(NUM_PAGES)
    scheduler = make_scheduler(pool, prefixes, lambda _: TREES[tree])
    asked = {i: sequence(i, pool, drafting=tree != "plain") for i in (0, 5)}
    for s in asked.values():
        scheduler.add(s)
        scheduler.step()
    finish(scheduler)
    return found, {i: s.tokens[:MAX_TOKENS] for i, s in asked.items()}


@pytest.mark.parametrize("tree", TREES)
def test_forwards_are_launched_ahead_where_cached_prefixes_fill_all_pages(
    tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, said = rooms_found(tree, monkeypatch)
    assert found
    assert all(found)
    assert said == {i: solo(i) for i in said}


@pytest.mark.parametrize("tree", TREES)
def test_without_room_made_ahead_they_are_not(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above notices."""
    monkeypatch.setattr(PageManager, "free_ahead", lambda *_: None)
    found, said = rooms_found(tree, monkeypatch)
    assert not all(found)
    assert said == {i: solo(i) for i in said}


def test_no_more_prefixes_are_evicted_than_may_be_wanted() -> None:
    pool, prefixes = full_of_prefixes(10)
    manager = PageManager(states(), prefixes)
    manager.free_ahead(pool, 2, PAGE_SIZE + 1)
    assert (pool.num_free, pool.num_idle) == (4, 5)
    manager.free_ahead(pool, 2, PAGE_SIZE + 1)
    assert (pool.num_free, pool.num_idle) == (4, 5)
    manager.free_ahead(pool, 20, PAGE_SIZE)
    assert (pool.num_free, pool.num_idle) == (9, 0)


def test_what_has_no_room_has_nothing() -> None:
    """Nor the prefix that it could have begun with."""
    pool, prefixes = full_of_prefixes(4)
    manager, s = PageManager(states(), prefixes), sequence(6, pool, drafting=False)
    assert not manager.begin(s, 5 * PAGE_SIZE)
    assert (s.num_computed_tokens, len(s.pages.held)) == (0, 0)
    assert manager.begin(s, 2 * PAGE_SIZE)
    assert len(s.pages.held) == 2
    manager.release(s)
    assert pool.num_used == pool.num_idle
