"""First tokens that are read after the next prefill was launched: nobody says anything else."""

from __future__ import annotations

from typing import Any

import pytest
from trt_eagle3.decode.step.first_token import FirstTokens

from tests.decode.pair import NUM_PAGES, PAGE_SIZE
from tests.decode.scheduling import (
    CHAIN,
    MAX_TOKENS,
    finish,
    make_scheduler,
    pair,
    prompts,
    solo,
)
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.decode.step.decoder import Decoder


@pytest.fixture(autouse=True)
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "launches_ahead", True)


def sequence(index: int, scheduler: Scheduler, pool: PagePool) -> SequenceState:
    made = pair().sequence(prompts()[index], pool, drafting=True)
    scheduler.add(made)
    return made


def test_next_chunk_is_launched_before_first_tokens_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    prefill, append = Decoder.prefill, FirstTokens.append

    def launched(self: Decoder, chunks: Any, beside: Any) -> Any:
        events.append("launch")
        return prefill(self, chunks, beside)

    def read(self: FirstTokens) -> None:
        events.append("read")
        append(self)

    monkeypatch.setattr(Decoder, "prefill", launched)
    monkeypatch.setattr(FirstTokens, "append", read)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, None, lambda _: CHAIN, chunk=9)
    first, last = sequence(0, scheduler, pool), sequence(0, scheduler, pool)
    assert scheduler.step() == []
    (emission,) = scheduler.step()
    assert (emission.sequence, events) == (first, ["launch", "launch", "read"])
    emissions = scheduler.step()
    assert [e.sequence for e in emissions] == [last, first]  # once, with a cycle of both
    assert [e.begins for e in emissions] == [True, False]
    assert [len(e.parts) for e in emissions] == [2, 1]
    assert all(e.steps == CHAIN.steps for e in emissions)
    assert events == ["launch", "launch", "read", "read"]


@pytest.mark.parametrize("num_pages", [NUM_PAGES, 13])
@pytest.mark.parametrize("cached", [False, True])
def test_sequences_say_what_each_says_alone(num_pages: int, cached: bool) -> None:
    expected = [solo(i) for i in range(len(prompts()))]
    pool = PagePool(num_pages, PAGE_SIZE)
    prefixes = PrefixCache(pool) if cached else None
    scheduler = make_scheduler(pool, prefixes, lambda _: CHAIN, chunk=12)
    asked = [sequence(i, scheduler, pool) for i in range(len(prompts()))]
    said = finish(scheduler)
    assert [said[id(s)][:MAX_TOKENS] for s in asked] == expected
    assert cached or pool.num_used == 0


def test_who_is_cancelled_before_its_first_token_is_read_says_nothing() -> None:
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, None, lambda _: CHAIN, chunk=9)
    gone, stays = sequence(0, scheduler, pool), sequence(3, scheduler, pool)
    assert scheduler.step() == []
    scheduler.remove(gone)
    said = finish(scheduler)
    assert [*said] == [id(stays)]
    assert said[id(stays)][:MAX_TOKENS] == solo(3)
    assert pool.num_used == 0


def test_who_is_put_off_before_its_first_token_is_read_says_it_once() -> None:
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, None, lambda _: CHAIN, chunk=9)
    late, other = sequence(0, scheduler, pool), sequence(3, scheduler, pool)
    assert scheduler.step() == []
    scheduler._preempt(late)
    said = finish(scheduler)
    assert said[id(late)][:MAX_TOKENS] == solo(0)
    assert said[id(other)][:MAX_TOKENS] == solo(3)
    assert pool.num_used == 0


def test_after_a_pass_that_failed_the_first_tokens_under_way_are_forgotten() -> None:
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, None, lambda _: CHAIN, chunk=9)
    lost = [sequence(0, scheduler, pool), sequence(3, scheduler, pool)]
    assert scheduler.step() == []
    assert scheduler.reset() == lost
    fresh = sequence(1, scheduler, pool)
    said = finish(scheduler)
    assert [*said] == [id(fresh)]
    assert said[id(fresh)][:MAX_TOKENS] == solo(1)
