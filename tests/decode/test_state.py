"""Layer states: paged rows that move when they are committed; per-sequence states that follow the
accepted tokens and no others, through rejection, preemption, prefix reuse and cancellation.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.decode.pair import NUM_PAGES, PAGE_SIZE, PREFILL_CHUNK, VOCAB
from tests.decode.recurrent import ANSWERS, HashStates, make_decoder, make_scheduler
from tests.decode.scheduling import (
    BUSHY,
    CHAIN,
    LAYOUTS,
    MAX_TOKENS,
    TREES,
    finish,
    pair,
    prompts,
)
from tests.decode.test_prefix_cache import continued
from trt_eagle3.decode.forward.prompt_rows import PromptRows
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.page_manager import PageManager
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.memory.state import LayerStates, PagedStates, Prefix, layer_states
from trt_eagle3.decode.request.prompt import Prompt
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.decode.speculation.eagle import EagleDrafter
from trt_eagle3.decode.step.prefill import Prefiller
from trt_eagle3.errors import EngineFailedError, UserError
from trt_eagle3.spec import StateSpec

ROOM = 6  # snapshots
KEYS = StateSpec("k_cache.0", "paged", (1, 2), "float32")


def say(prompt: Prompt) -> list[int]:
    """What the target with its recurrent layer says alone, without speculation."""
    sequence = pair().sequence(prompt, PagePool(NUM_PAGES, PAGE_SIZE))
    tokens: list[int] = []
    for some in make_decoder(HashStates(0)).run(sequence):
        tokens += some
        if len(tokens) >= MAX_TOKENS:
            break
    ANSWERS[id(prompt)] = tokens[:MAX_TOKENS]
    return tokens[:MAX_TOKENS]


@cache
def alone(index: int) -> list[int]:
    return say(prompts()[index])


def answers(scheduler: Scheduler, pool: PagePool, indices: list[int]) -> list[list[int]]:
    """What prompts that draft say together."""
    asked = [pair().sequence(prompts()[i], pool, drafting=True) for i in indices]
    for s in asked:
        scheduler.add(s)
    output_ids = finish(scheduler)
    return [output_ids[id(s)][:MAX_TOKENS] for s in asked]


# Speculation, rejection


@pytest.mark.parametrize("tree", TREES)
def test_states_under_speculation_follow_what_was_accepted(tree: str) -> None:
    expected = [alone(i) for i in range(len(LAYOUTS))]
    states = HashStates(0)
    scheduler = make_scheduler(states, None, lambda _: TREES[tree])
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    assert answers(scheduler, pool, list(range(len(LAYOUTS)))) == expected
    assert states.entries == {}


def test_the_state_tells_in_the_tokens_and_drafts_are_accepted_and_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise these tests would hold of a layer that nobody reads."""
    asked = [0, 3, 6]
    for i in asked:
        alone(i)  # which drafts guess
    states = HashStates(0)
    scheduler = make_scheduler(states, None, lambda _: BUSHY)
    answers(scheduler, PagePool(NUM_PAGES, PAGE_SIZE), asked)
    assert {1, 2, 3} <= set(states.num_replayed)
    monkeypatch.setattr("tests.decode.recurrent._NOISE", 0.0)
    assert say(prompts()[3]) != alone(3)


# Preemption, resumption


@pytest.mark.parametrize("cached", [False, True])
def test_states_of_a_preempted_sequence_are_computed_again(cached: bool) -> None:
    expected = [alone(i) for i in (3, 4)]
    pool = PagePool(17, PAGE_SIZE)  # both begin, one can end
    prefixes = PrefixCache(pool) if cached else None
    states = HashStates(ROOM)
    scheduler = make_scheduler(states, prefixes, lambda _: BUSHY)
    assert answers(scheduler, pool, [3, 4]) == expected
    assert scheduler.num_preempted > 0
    assert (scheduler.num_reused_rows > 0) is cached
    if prefixes:
        prefixes.clear()
    assert (pool.num_used, states.num_saved, states.entries) == (0, 0, {})


# Prefix reuse


@pytest.mark.parametrize("index", range(len(LAYOUTS)))
def test_prompt_that_comes_again_begins_from_its_last_snapshot(index: int) -> None:
    expected = alone(index)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(HashStates(20), PrefixCache(pool), lambda _: CHAIN)
    assert answers(scheduler, pool, [index]) == [expected]
    assert scheduler.num_reused_rows == 0
    assert answers(scheduler, pool, [index]) == [expected]
    num_rows = (len(prompts()[index].token_ids) - 1) // PAGE_SIZE * PAGE_SIZE
    assert scheduler.num_reused_rows == num_rows


def test_prompt_that_goes_on_reuses_the_pages_up_to_a_snapshot() -> None:
    first = prompts()[3]
    second = continued(first, [3, 1, 4, 1, 5, 9])
    expected = say(second)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(HashStates(ROOM), PrefixCache(pool), lambda _: CHAIN)
    answers(scheduler, pool, [3])
    s = pair().sequence(second, pool, drafting=True)
    scheduler.add(s)
    assert finish(scheduler)[id(s)][:MAX_TOKENS] == expected
    assert scheduler.num_reused_rows == 16


@pytest.mark.parametrize("room", [0, 1, 2])
def test_snapshots_take_no_more_room_than_there_is(room: int) -> None:
    """The least recently used one makes room, and without any nothing is reused."""
    expected = [alone(i) for i in (3, 6, 3, 3)]
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    prefixes = PrefixCache(pool)
    states = HashStates(room)
    scheduler = make_scheduler(states, prefixes, lambda _: CHAIN)
    found = [answers(scheduler, pool, [i])[0] for i in (3, 6, 3, 3)]
    assert found == expected
    assert (scheduler.num_reused_rows > 0) is (room > 0)
    assert prefixes.num_snapshots == states.num_saved <= room


def test_evicted_page_takes_its_snapshot_along() -> None:
    alone(6)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    prefixes = PrefixCache(pool)
    states = HashStates(20)
    answers(make_scheduler(states, prefixes, lambda _: None), pool, [6])
    assert states.num_saved == prefixes.num_snapshots > 0
    prefixes.evict(NUM_PAGES)
    assert (states.num_saved, prefixes.num_snapshots, len(prefixes)) == (0, 0, 0)


def test_chunks_end_where_pages_do_only_where_states_are_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone(6)
    run, seen = Prefiller.run, list[int]()

    def watched(self: Prefiller, chunks: Any, *beside: Any) -> Any:
        seen.extend(count for _, count in chunks)
        return run(self, chunks, *beside)

    monkeypatch.setattr(Prefiller, "run", watched)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    for prefixes, counts in (
        (PrefixCache(pool), [PAGE_SIZE] * 8 + [1]),
        (None, [PREFILL_CHUNK] * 6 + [3]),
    ):
        seen.clear()
        answers(make_scheduler(HashStates(2), prefixes, lambda _: None), pool, [6])
        assert seen == counts


def test_of_an_answer_s_snapshots_the_newest_alone_is_kept() -> None:
    alone(0)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    states = HashStates(20)
    scheduler = make_scheduler(states, PrefixCache(pool), lambda _: None)
    s = pair().sequence(prompts()[0], pool)
    scheduler.add(s)
    while len(s.tokens) < MAX_TOKENS:
        scheduler.step()
        assert len([n for n in s.snapshots if n * PAGE_SIZE > len(s.prompt.token_ids)]) <= 1
    assert s.snapshots


# Cancellation, failure


def test_cancelled_and_failed_sequences_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone(0)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    prefixes = PrefixCache(pool)
    states = HashStates(20)
    scheduler = make_scheduler(states, prefixes, lambda _: BUSHY)
    for index in range(3):  # cancelled in its prompt, in its answer, or not admitted yet
        s = pair().sequence(prompts()[6], pool, drafting=True)
        scheduler.add(s)
        for _ in range((2, 12, 0)[index]):
            scheduler.step()
        scheduler.remove(s)
        assert (states.entries, s.snapshots) == ({}, {})
    assert answers(scheduler, pool, [0]) == [expected]
    sampled = SamplingParams(temperature=1.0)
    bad = SequenceState(prompts()[4], pool, VOCAB, sampled, drafting=True)
    monkeypatch.setattr(bad.sampler, "first", lambda _: torch.tensor(-1))
    scheduler.add(bad)
    errors = [e.error for _ in range(8) for e in scheduler.step() if e.error]
    assert isinstance(errors[0], EngineFailedError)
    lost = pair().sequence(prompts()[4], pool, drafting=True)
    scheduler.add(lost)
    scheduler.step()
    assert scheduler.reset() == [lost]
    assert (states.entries, states.num_saved, pool.num_used) == ({}, 0, 0)


def test_prefill_that_is_run_again_commits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft runs out of memory after the target's forward; each prompt is then tried alone."""
    expected = [alone(i) for i in (0, 3)]
    prefill = EagleDrafter.prefill

    def narrow(self: EagleDrafter, rows: PromptRows, *args: Any) -> None:
        if len(rows.segments) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        prefill(self, rows, *args)

    monkeypatch.setattr(EagleDrafter, "prefill", narrow)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(HashStates(0), None, lambda _: CHAIN)
    scheduler._decoder.prefill_chunk = 64  # both in one forward
    assert answers(scheduler, pool, [0, 3]) == expected


@pytest.mark.parametrize("seed", range(4))
def test_states_follow_any_sequence_of_events(seed: int) -> None:
    """Requests come and go, readers stall, pages run out, snapshots are few."""
    expected = [alone(i) for i in range(len(LAYOUTS))]
    chance = random.Random(seed)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    prefixes = PrefixCache(pool) if seed % 4 else None
    states = HashStates(chance.choice([1, 3, 9]))
    scheduler = make_scheduler(states, prefixes, lambda batch: TREES[trees[batch.size % 2]])
    asked: dict[int, tuple[SequenceState, int]] = {}
    held: list[int] = []
    trees = ["plain", "bushy"]
    for _ in range(80):
        trees = chance.sample(sorted(TREES), 2)
        event = chance.random()
        if event < 0.2:
            index = chance.randrange(len(LAYOUTS))
            s = pair().sequence(prompts()[index], pool, drafting=chance.random() < 0.8)
            asked[id(s)] = (s, index)
            scheduler.add(s)
        elif event < 0.25 and asked:
            scheduler.remove(asked.pop(chance.choice(list(asked)))[0])
        elif event < 0.35 and asked:
            chance.choice(list(asked.values()))[0].backpressured = chance.random() < 0.5
        elif event < 0.45:
            held += pool.take(min(chance.randrange(12), pool.num_free))
        elif event < 0.55:
            pool.give_back(held)
            held = []
        for emission in scheduler.step():
            s, index = asked[id(emission.sequence)]
            assert emission.error is None
            if len(s.tokens) >= MAX_TOKENS or emission.full:
                assert s.tokens[:MAX_TOKENS] == expected[index]
                scheduler.remove(s)
                del asked[id(s)]
    for s, _ in asked.values():
        scheduler.remove(s)
    if prefixes is not None:
        prefixes.clear()
    assert (states.entries, states.num_saved, pool.num_used) == ({}, 0, len(held))


# Planted faults


def _replay_by(
    change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> Callable[[pytest.MonkeyPatch], None]:
    """``change``: of a path and its counts."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = HashStates.to_replay

        def wrong(self: HashStates, inputs: Any, path: torch.Tensor, counts: torch.Tensor) -> Any:
            return right(self, inputs, *change(path, counts))

        patch.setattr(HashStates, "to_replay", wrong)

    return plant


def _skip_restore(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HashStates, "restore", lambda self, sequence, _: self.reserve(sequence))


def _keep_entry(patch: pytest.MonkeyPatch) -> None:
    """A preempted sequence finds its entry as it left it."""
    patch.setattr(HashStates, "release", lambda *_: None)


def _reuse_without_snapshot(patch: pytest.MonkeyPatch) -> None:
    match = PrefixCache.match
    patch.setattr(PrefixCache, "match", lambda self, keys, **_: match(self, keys))


def _snapshot_of_another_page(patch: pytest.MonkeyPatch) -> None:
    match = PrefixCache.match

    def late(self: PrefixCache, keys: Any, **options: Any) -> Prefix:
        found = match(self, keys, **options)
        return Prefix(found.pages[:-1], found.snapshot)

    patch.setattr(PrefixCache, "match", late)


def _save_anywhere(patch: pytest.MonkeyPatch) -> None:
    """Chunks end anywhere, and what is saved there passes for the last page's end."""
    patch.setattr(
        PageManager, "chunk_end", lambda _, s, n: min(s.num_computed_tokens + n, s.num_prefill)
    )

    def save(self: PageManager, sequences: list[SequenceState]) -> None:
        for s in sequences:
            if s.num_computed_tokens >= PAGE_SIZE and (snapshot := self._snapshot(s)) is not None:
                stale = s.snapshots.pop(s.num_computed_tokens // PAGE_SIZE, None)
                if stale:
                    stale.release()
                s.keep_snapshot(snapshot)

    patch.setattr(PageManager, "save_where_pages_end", save)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "commit keeps rejected tokens": _replay_by(
        lambda path, counts: (path, torch.full_like(counts, path.shape[1]))
    ),
    "commit one token short": _replay_by(lambda path, n: (path, (n - 1).clamp(min=1))),
    "commit by position": _replay_by(
        lambda path, n: (torch.arange(path.shape[1]).expand_as(path), n)
    ),
    "restore skipped": _skip_restore,
    "entry kept over a preemption": _keep_entry,
    "pages reused without a snapshot": _reuse_without_snapshot,
    "snapshot of another page": _snapshot_of_another_page,
    "saved where no page ends": _save_anywhere,
}


@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_planted_fault_in_a_state_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [alone(i) for i in (3, 4, 3)]

    def meet() -> None:
        pool = PagePool(17, PAGE_SIZE)
        scheduler = make_scheduler(HashStates(9), PrefixCache(pool), lambda _: BUSHY)
        found = answers(scheduler, pool, [3, 4])
        assert [*found, *answers(scheduler, pool, [3])] == expected

    if fault == "none":
        meet()
        return
    FAULTS[fault](monkeypatch)
    with pytest.raises(AssertionError):
        meet()


# Paged states


def test_commit_of_paged_states_moves_the_rows_that_stay() -> None:
    paged = PagedStates([KEYS], 8 * PAGE_SIZE)
    states = LayerStates(paged)
    buffer = dict(paged._cache.bindings())["k_cache.0"]
    buffer[:, 0, 0] = torch.arange(8.0 * PAGE_SIZE)
    pool = PagePool(8, PAGE_SIZE)
    s, other = (pair().sequence(prompts()[0], pool) for _ in range(2))
    s.pages.reserve(12)
    other.pages.reserve(4)
    slots, others = s.pages.slots(torch.arange(12)), other.pages.slots(torch.arange(4))
    before, of_other = buffer[slots, 0, 0].tolist(), buffer[others, 0, 0].tolist()
    inputs = states.inputs([s, other], [12, 4])
    path = torch.tensor([[0, 2, 5, 1], [0, 1, 7, 9]])  # of the second no row past the first is held
    first, counts = torch.tensor([3, 3], dtype=torch.int32), torch.tensor([3, 1])
    states.commit(inputs, first, path, counts, PAGE_SIZE, in_place=False)
    after = buffer[slots, 0, 0].tolist()
    assert after[:6] == [*before[:3], before[3], before[5], before[8]]
    assert buffer[others, 0, 0].tolist() == of_other


def test_a_graph_without_states_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="list no layer states: an older version built"):
        layer_states([], 8)
