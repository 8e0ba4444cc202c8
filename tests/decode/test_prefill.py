"""Prefill: first tokens are chosen where prompts end, given to the draft, and appended once the
host reads them, which may be after the next prefill was launched.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.decode.pair import NUM_PAGES, PAGE_SIZE, VOCAB
from tests.decode.scheduling import (
    CHAIN,
    MAX_SEQ_LEN,
    MAX_TOKENS,
    finish,
    make_scheduler,
    pair,
    prompts,
    solo,
)
from trt_eagle3.decode.forward.segment import Segment
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.decode.step.prefill import FirstTokens, Prefiller


def ending() -> tuple[SequenceState, SequenceState]:
    """Prompts of 9 and 17 rows."""
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    return pair().sequence(prompts()[0], pool), pair().sequence(prompts()[3], pool)


def logits_of(*best: int) -> Tensor:
    return torch.eye(VOCAB)[list(best)]


def test_first_tokens_are_those_of_prompts_that_end() -> None:
    ends, goes_on = ending()
    tokens = FirstTokens([(goes_on, 5), (ends, 9)], logits_of(3, 7))
    assert ends.tokens == []  # until they are read
    tokens.append()
    assert (ends.tokens, goes_on.tokens) == ([7], [])


def test_first_tokens_of_logits_that_are_not_finite_are_none() -> None:
    ends, other = ending()
    other.num_computed_tokens = 8
    logits = logits_of(3, 7)
    logits[0][5] = torch.nan
    FirstTokens([(ends, 9), (other, 9)], logits).append()
    assert (ends.tokens, other.tokens) == ([], [7])


def test_first_tokens_of_a_restarted_sequence_are_not_chosen_twice() -> None:
    ends, _ = ending()
    ends.append_tokens((4,))
    FirstTokens([(ends, 9)], logits_of(3)).append()
    assert ends.tokens == [4]


def test_put_ids_fills_the_last_row_of_the_last_segment() -> None:
    ends, goes_on = ending()
    tokens = FirstTokens([(goes_on, 5), (ends, 9)], logits_of(3, 7))
    ids = torch.arange(18).view(3, 6)[:, 1:]
    segments = [Segment(goes_on, 0, 5), Segment(ends, 0, 5, is_last=False), Segment(ends, 5, 4)]
    expected = ids.clone()
    expected[2, 3] = 7
    assert tokens.put_ids(ids, segments).equal(expected)
    assert ids[2, 3] == 16, "the prefill's own stay"


def test_put_ids_fills_rows_of_drafting_sequences_alone() -> None:
    first, second = ending()
    tokens = FirstTokens([(first, 9), (second, 17)], logits_of(3, 7))
    found = tokens.put_ids(torch.zeros(1, 17, dtype=torch.int64), [Segment(second, 0, 17)])
    assert found.tolist() == [[0] * 16 + [7]]


# First tokens that are read after the next prefill was launched


def ahead(
    *indices: int, chunk: int = 9, num_pages: int = NUM_PAGES, cached: bool = False
) -> tuple[Scheduler, PagePool, list[SequenceState]]:
    """A scheduler that runs ahead of the host, with the prompts ``indices``."""
    pool = PagePool(num_pages, PAGE_SIZE, table_len=MAX_SEQ_LEN // PAGE_SIZE)
    prefixes = PrefixCache(pool) if cached else None
    scheduler = make_scheduler(pool, prefixes, lambda _: CHAIN, chunk=chunk)
    return scheduler, pool, [asked(index, scheduler, pool) for index in indices]


def asked(index: int, scheduler: Scheduler, pool: PagePool) -> SequenceState:
    sequence = pair().sequence(prompts()[index], pool, drafting=True)
    scheduler.add(sequence)
    return sequence


def test_next_chunk_is_launched_before_first_tokens_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    run, append = Prefiller.run, FirstTokens.append

    def launched(self: Prefiller, *args: Any) -> Any:
        events.append("launch")
        return run(self, *args)

    def read(self: FirstTokens) -> None:
        events.append("read")
        append(self)

    monkeypatch.setattr(Prefiller, "run", launched)
    monkeypatch.setattr(FirstTokens, "append", read)
    scheduler, _, (first, last) = ahead(0, 0)
    assert scheduler.step() == []
    (emission,) = scheduler.step()
    assert (emission.sequence, events) == (first, ["launch", "launch", "read"])
    emissions = scheduler.step()
    assert [e.sequence for e in emissions] == [last, first]  # once, with a step of both
    assert [e.begins for e in emissions] == [True, False]
    assert [len(e.parts) for e in emissions] == [2, 1]
    assert all(e.tree_depth == CHAIN.depth for e in emissions)
    assert events == ["launch", "launch", "read", "read"]


@pytest.mark.parametrize("num_pages", [NUM_PAGES, 13])
@pytest.mark.parametrize("cached", [False, True])
def test_sequences_emit_what_each_emits_alone(num_pages: int, cached: bool) -> None:
    indices = range(len(prompts()))
    scheduler, pool, sequences = ahead(*indices, chunk=12, num_pages=num_pages, cached=cached)
    found = finish(scheduler)
    assert [found[id(s)][:MAX_TOKENS] for s in sequences] == [solo(i) for i in indices]
    assert scheduler.num_preempted or num_pages == NUM_PAGES
    assert cached or pool.num_used == 0


@pytest.mark.parametrize("preempted", [False, True])
def test_sequence_that_leaves_before_its_first_token_is_read(preempted: bool) -> None:
    """A cancelled one emits nothing; a preempted one emits its token once."""
    scheduler, pool, (leaves, stays) = ahead(0, 3)
    assert scheduler.step() == []
    (scheduler._preempt if preempted else scheduler.remove)(leaves)
    found = finish(scheduler)
    expected = {id(stays): solo(3)} | ({id(leaves): solo(0)} if preempted else {})
    assert {key: tokens[:MAX_TOKENS] for key, tokens in found.items()} == expected
    assert pool.num_used == 0


def test_first_tokens_in_flight_are_forgotten_after_a_step_that_failed() -> None:
    scheduler, pool, lost = ahead(0, 3)
    assert scheduler.step() == []
    assert scheduler.reset() == lost
    fresh = asked(1, scheduler, pool)
    found = finish(scheduler)
    assert [*found] == [id(fresh)]
    assert found[id(fresh)][:MAX_TOKENS] == solo(1)
