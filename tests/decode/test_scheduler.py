"""The scheduler: batches, scarce pages, sequences that fail or whose readers lag; every answer
as if it were alone.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.decode.pair import NUM_PAGES, PAGE_SIZE, PREFILL_CHUNK, VOCAB
from tests.decode.scheduling import (
    BUSHY,
    CHAIN,
    LAYOUTS,
    MAX_SEQ_LEN,
    MAX_TOKENS,
    TREES,
    Encoding,
    finish,
    make_scheduler,
    pair,
    prompts,
    solo,
)
from trt_eagle3.decode.forward.runner import AttentionMetadata
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.request.prompt import Prompt
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.decode.schedule import scheduler as scheduler_module
from trt_eagle3.decode.speculation.accept import NO_TOKEN
from trt_eagle3.decode.speculation.verify import LogitsForm, verify
from trt_eagle3.decode.step import prefill, stepper
from trt_eagle3.decode.step.prefill import FirstTokens, Prefiller
from trt_eagle3.errors import DeviceMemoryError, EngineFailedError


@pytest.mark.parametrize("tree", TREES)
def test_batch_of_mixed_sequences_says_what_each_says_alone(tree: str) -> None:
    expected = [solo(i) for i in range(len(LAYOUTS))]
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, None, lambda _: TREES[tree])
    asked = [pair().sequence(p, pool, drafting=i != 2) for i, p in enumerate(prompts())]
    for s in asked:
        scheduler.add(s)
    output_ids = finish(scheduler)
    assert [output_ids[id(s)][:MAX_TOKENS] for s in asked] == expected
    assert pool.num_free == pool.num_pages - 1


@pytest.mark.parametrize("tree", ["chain", "bushy", "dynamic"])
def test_batch_of_fixed_shapes_without_run_ahead_emits_what_each_emits_alone(
    tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``validate`` decodes on a GPU: page tables of one length, no step ahead of the host."""
    expected = [solo(i) for i in range(len(LAYOUTS))]
    pool = PagePool(NUM_PAGES, PAGE_SIZE, table_len=MAX_SEQ_LEN // PAGE_SIZE)
    scheduler = make_scheduler(pool, None, lambda _: TREES[tree], run_ahead=False)
    tables, inputs = set[int](), AttentionMetadata.inputs

    def watched(self: AttentionMetadata, rows: torch.Tensor) -> Any:
        tables.add(self.state_inputs["page_table"].shape[1])
        return inputs(self, rows)

    monkeypatch.setattr(AttentionMetadata, "inputs", watched)
    asked = [pair().sequence(p, pool, drafting=i != 2) for i, p in enumerate(prompts())]
    for s in asked:
        scheduler.add(s)
    output_ids = finish(scheduler)
    assert [output_ids[id(s)][:MAX_TOKENS] for s in asked] == expected
    assert tables == {MAX_SEQ_LEN // PAGE_SIZE}


def test_long_prompt_stalls_nobody_for_longer_than_a_chunk() -> None:
    solo(0)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, None, lambda _: None)
    short, long = (pair().sequence(prompts()[i], pool) for i in (0, 6))
    scheduler.add(short)
    while not short.tokens:
        scheduler.step()
    scheduler.add(long)
    for _ in range(-(-33 // PREFILL_CHUNK)):
        before = long.num_computed_tokens
        assert [e.sequence for e in scheduler.step() if e.sequence is short] == [short]
        assert long.num_computed_tokens - before <= PREFILL_CHUNK
    assert long.prefilled


def test_short_prompts_share_a_prefill_pass() -> None:
    solo(0)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, None, lambda _: None, chunk=64)
    asked = [pair().sequence(prompts()[i], pool) for i in (0, 1, 3)]
    for s in asked:
        scheduler.add(s)
    scheduler.step()
    assert [s.prefilled for s in asked] == [True, True, True]


@pytest.mark.parametrize("chunk", [PREFILL_CHUNK, 12, 30])
def test_prefill_pass_of_many_prompts_is_no_larger_than_a_chunk_padding_included(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine is built for so many rows in one pass."""
    solo(0)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, None, lambda _: CHAIN, chunk=chunk)
    rows: list[int] = []
    run = Prefiller.run

    def watched(self: Prefiller, chunks: Any, beside: Any) -> Any:
        rows.append(len(chunks) * max(count for _, count in chunks))
        return run(self, chunks, beside)

    monkeypatch.setattr(Prefiller, "run", watched)
    for prompt in prompts():
        scheduler.add(pair().sequence(prompt, pool, drafting=True))
    finish(scheduler)
    assert max(rows) <= chunk
    assert max(rows) > chunk / 2


def test_prompt_whose_logits_are_needed_runs_alone_and_in_turn_with_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = [solo(i) for i in (6, 1, 4)]
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, None, lambda _: CHAIN, chunk=8)
    sampling = SamplingParams(prompt_logprobs=1)
    scored = SequenceState(prompts()[6], pool, VOCAB, sampling, drafting=True)
    others = [pair().sequence(prompts()[i], pool, drafting=True) for i in (1, 4)]
    needed: list[bool] = []
    run = Prefiller.run

    def watched(self: Prefiller, chunks: Any, beside: Any) -> Any:
        needs = [s.needs_prompt_logits for s, _ in chunks]
        assert len(chunks) == 1 or not any(needs)
        needed.append(any(needs))
        return run(self, chunks, beside)

    monkeypatch.setattr(Prefiller, "run", watched)
    for s in (scored, *others):
        scheduler.add(s)
    output_ids = finish(scheduler)
    assert needed[:4] == [True, False, True, False]
    assert [output_ids[id(s)][:MAX_TOKENS] for s in (scored, *others)] == expected
    assert scored.prompt_logprobs is not None
    assert None not in scored.prompt_logprobs[1:]


@pytest.mark.parametrize("tree", ["plain", "bushy"])
def test_sequence_that_has_as_many_tokens_as_can_be_is_full(tree: str) -> None:
    solo(0)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, None, lambda _: TREES[tree])
    s = pair().sequence(prompts()[6], pool, drafting=True)
    scheduler.add(s)
    finish(scheduler, limit=MAX_SEQ_LEN)
    assert s.num_tokens == MAX_SEQ_LEN


def test_pages_that_run_out_put_off_who_came_last_and_nobody_notices() -> None:
    expected = {i: solo(i) for i in (3, 4)}
    # 16 pages: both begin, one can end
    pool = PagePool(17, PAGE_SIZE)
    scheduler = make_scheduler(pool, None, lambda _: BUSHY)
    asked = {i: pair().sequence(prompts()[i], pool, drafting=True) for i in (3, 4)}
    for s in asked.values():
        scheduler.add(s)
    output_ids = finish(scheduler)
    assert scheduler.num_preempted >= 1
    assert {i: output_ids[id(s)][:MAX_TOKENS] for i, s in asked.items()} == expected


def test_pages_that_run_out_are_taken_from_nobody_but_the_last() -> None:
    expected = {i: solo(i) for i in (0, 3, 5)}
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, None, lambda _: None)
    asked = {i: pair().sequence(prompts()[i], pool) for i in expected}
    first, second, third = asked.values()
    for s in asked.values():
        scheduler.add(s)
    while not all(s.tokens for s in asked.values()):
        scheduler.step()
    assert (scheduler.num_preempted, scheduler.num_reused_rows) == (0, 0)
    held = pool.take(pool.num_free)
    while scheduler.num_preempted == 0:
        scheduler.step()
    assert (scheduler.running, list(scheduler.waiting)) == ([first, second], [third])
    pool.give_back(held)
    finish(scheduler)
    assert {i: s.tokens[:MAX_TOKENS] for i, s in asked.items()} == expected


@pytest.mark.parametrize("cached", [False, True])
def test_who_comes_back_has_room_for_a_cycle(cached: bool) -> None:
    """Nobody is computed again only to be put off before it has said anything."""
    solo(0)
    pool = PagePool(17, PAGE_SIZE)
    scheduler = make_scheduler(pool, PrefixCache(pool) if cached else None, lambda _: BUSHY)
    for i in (3, 4, 3):
        scheduler.add(pair().sequence(prompts()[i], pool, drafting=True))
    admitted: dict[int, int] = {}  # tokens that a sequence had when it was let in
    while scheduler.running or scheduler.waiting:
        before = {id(s) for s in scheduler.running}
        output_ids = scheduler.step()
        for s in scheduler.running:
            if id(s) not in before:
                assert len(s.tokens) > admitted.get(id(s), -1)
                admitted[id(s)] = len(s.tokens)
        for emission in output_ids:
            if len(emission.sequence.tokens) >= MAX_TOKENS:
                scheduler.remove(emission.sequence)
    assert scheduler.num_preempted >= 1


def test_sampled_sequence_that_was_put_off_goes_on_with_its_random_numbers() -> None:
    """Alone and put off midway, the same seed says the same."""
    sampling = SamplingParams(temperature=1.5, seed=5, repetition_penalty=1.3)
    answers = []
    for interrupted in (False, True):
        pool = PagePool(NUM_PAGES, PAGE_SIZE)
        scheduler = make_scheduler(pool, None, lambda _: CHAIN)
        s = SequenceState(prompts()[0], pool, VOCAB, sampling, drafting=True)
        scheduler.add(s)
        for step in itertools.count():
            scheduler.step()
            if interrupted and step == 4:
                scheduler._preempt(s)
            if len(s.tokens) >= MAX_TOKENS:
                break
        answers.append(s.tokens[:MAX_TOKENS])
    assert answers[0] == answers[1]


def test_picture_that_cannot_be_seen_fails_its_own_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = solo(0)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    encoder, prefixes = Encoding(), PrefixCache(pool)
    scheduler = make_scheduler(pool, prefixes, lambda _: CHAIN, vision=encoder)

    def blind(_: Prompt) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(encoder, "encode", blind)
    bad = pair().sequence(prompts()[1].with_vision(None), pool, drafting=True)
    good = pair().sequence(prompts()[0], pool, drafting=True)
    scheduler.add(bad)
    scheduler.add(good)
    failed = [e for e in scheduler.step() if e.error is not None]
    assert [(e.sequence, str(e.error)) for e in failed] == [(bad, "out of memory")]
    assert finish(scheduler)[id(good)][:MAX_TOKENS] == expected
    assert pool.num_used == len(prefixes)


def test_prompt_too_large_for_memory_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of several prompts that does not fit is tried for each alone; who was in it
    loses nothing.
    """
    expected = {i: solo(i) for i in (0, 3)}
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, None, lambda _: CHAIN, chunk=64)
    asked = {i: pair().sequence(prompts()[i], pool, drafting=True) for i in (0, 1, 3)}
    run = Prefiller.run

    def narrow(self: Prefiller, chunks: Any, *beside: Any) -> Any:
        if any(s is asked[1] for s, _ in chunks):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(self, chunks, *beside)

    monkeypatch.setattr(Prefiller, "run", narrow)
    for sequence in asked.values():
        scheduler.add(sequence)
    failed = [e for e in scheduler.step() if e.error is not None]
    assert [e.sequence for e in failed] == [asked[1]]
    assert isinstance(failed[0].error, DeviceMemoryError)
    assert "prefill_chunk" in str(failed[0].error)
    finish(scheduler)
    assert {i: asked[i].tokens[:MAX_TOKENS] for i in expected} == expected
    assert pool.num_used == 0


def test_cycles_wait_for_one_prompts_images_at_a_time_and_nobody_keeps_them() -> None:
    expected = {i: solo(i) for i in (2, 1, 5)}
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    encoder = Encoding()
    seen = encoder.seen
    scheduler = make_scheduler(pool, None, lambda _: CHAIN, chunk=64, vision=encoder)
    asked = {
        i: pair().sequence(prompts()[i].with_vision(None), pool, drafting=True) for i in expected
    }
    scheduler.add(asked[2])
    scheduler.step()
    for i in (1, 5):
        scheduler.add(asked[i])
    for i in (1, 2):
        assert asked[2] in [e.sequence for e in scheduler.step()]
        assert seen == [1, 5][:i]
    assert all(s.prefilled and s.vision is None for s in asked.values())
    scheduler._preempt(asked[5])
    finish(scheduler)
    assert {i: s.tokens[:MAX_TOKENS] for i, s in asked.items()} == expected
    assert seen == [1, 5, 5], "computed again, it looks again"


@pytest.mark.parametrize("when", ["prefill", "decode"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_sequence_whose_logits_are_no_numbers_fails_alone(
    when: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = solo(0)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, PrefixCache(pool), lambda _: CHAIN)
    good, bad = (pair().sequence(prompts()[i], pool, drafting=True) for i in (0, 3))

    def overflow_first(chunks: Any, logits: Any, *rest: Any) -> FirstTokens:
        for (s, _), row in zip(chunks, logits, strict=True):
            if s is bad:
                row[1] = value
        return FirstTokens(chunks, logits, *rest)

    def overflow(
        logits_form: LogitsForm, samplers: Any, proposal: Any, reduced: Any, *rest: Any
    ) -> Any:
        assert logits_form is LogitsForm.TOKENS
        reduced[[s is bad.sampler for s in samplers], -1] = NO_TOKEN  # as of any such logits
        return verify(logits_form, samplers, proposal, reduced, *rest)

    scheduler.add(good)
    while not good.prefilled:
        scheduler.step()
    scheduler.add(bad)
    if when == "prefill":
        monkeypatch.setattr(prefill, "FirstTokens", overflow_first)
    else:
        monkeypatch.setattr(stepper, "verify", overflow)
    errors = []
    for _ in range(8):
        errors += [e for e in scheduler.step() if e.error is not None]
    monkeypatch.undo()
    assert [e.sequence for e in errors] == [bad]
    assert isinstance(errors[0].error, EngineFailedError)
    assert "engine.residual: float32" in str(errors[0].error)
    assert bad.pages.held == ()
    finish(scheduler)
    assert good.tokens[:MAX_TOKENS] == expected


def test_step_for_nobody_but_lagging_readers_does_nothing() -> None:
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, None, lambda _: CHAIN)
    s = pair().sequence(prompts()[6], pool, drafting=True)
    scheduler.add(s)
    scheduler.step()
    s.backpressured = True
    assert scheduler.idle
    assert scheduler.step() == []
    assert s.num_computed_tokens == PREFILL_CHUNK


def test_sequences_whose_readers_lag_leave_their_places_to_others() -> None:
    """A batch of lagging readers: whoever comes is answered, and they go on where they stopped."""
    expected = {i: solo(i) for i in (0, 1, 3, 5)}
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, PrefixCache(pool), lambda _: CHAIN)
    asked = {i: pair().sequence(prompts()[i], pool, drafting=True) for i in expected}
    *slow, quick = asked.values()
    for s in slow:
        scheduler.add(s)
    while not all(s.tokens for s in slow):
        scheduler.step()
    for s in slow:
        s.backpressured = True
    assert scheduler.idle
    scheduler.add(quick)
    assert not scheduler.idle
    for _ in range(2 * MAX_TOKENS):
        if len(quick.tokens) < MAX_TOKENS:
            scheduler.step()
    assert quick.tokens[:MAX_TOKENS] == expected[5]
    scheduler.remove(quick)
    assert scheduler.idle
    for s in slow:
        s.backpressured = False
    finish(scheduler)
    assert {i: s.tokens[:MAX_TOKENS] for i, s in asked.items()} == expected


def test_request_that_waits_takes_the_place_of_the_longest_and_all_say_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = {i: solo(i) for i in (0, 1, 3)}
    monkeypatch.setattr(scheduler_module, "_TURN_TOKENS", 6)
    monkeypatch.setattr(scheduler_module, "_PATIENCE_SECONDS", 0.0)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, PrefixCache(pool), lambda _: None)
    scheduler._max_batch_size = 1
    asked = {i: pair().sequence(prompts()[i], pool, drafting=True) for i in expected}
    scheduler.add(asked[0])
    while len(asked[0].tokens) < 3:
        scheduler.step()
    scheduler.add(asked[1])
    scheduler.step()
    assert scheduler.running == [asked[0]], "its turn is not over"
    while len(asked[0].tokens) < 6:
        scheduler.step()
    scheduler.add(asked[3])
    scheduler.step()
    assert scheduler.running == [asked[1]]
    assert list(scheduler.waiting) == [asked[3], asked[0]], "who has run is last"
    finish(scheduler)
    assert {i: s.tokens[:MAX_TOKENS] for i, s in asked.items()} == expected


def test_request_that_has_its_first_token_takes_nobodys_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solo(0)
    monkeypatch.setattr(scheduler_module, "_TURN_TOKENS", 4)
    monkeypatch.setattr(scheduler_module, "_PATIENCE_SECONDS", 0.0)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, None, lambda _: None)
    scheduler._max_batch_size = 1
    first, second = (pair().sequence(prompts()[i], pool) for i in (0, 1))
    scheduler.add(first)
    while len(first.tokens) < 5:
        scheduler.step()
    scheduler.add(second)
    while len(second.tokens) < 8:
        scheduler.step()
    assert scheduler.running == [second]
    assert scheduler.num_preempted == 1


def test_pages_are_taken_from_lagging_readers_first() -> None:
    """Pages run out in the middle of an answer: the oldest, whom nobody reads, gives way before
    the newest does.
    """
    expected = {i: solo(i) for i in (0, 1, 3)}
    for num_pages in range(8, NUM_PAGES):
        pool = PagePool(num_pages, PAGE_SIZE)
        scheduler = make_scheduler(pool, None, lambda _: CHAIN)
        lagging, *others = asked = [
            pair().sequence(prompts()[i], pool, drafting=True) for i in expected
        ]
        for s in asked:
            scheduler.add(s)
        while scheduler.waiting and not scheduler.num_preempted:
            scheduler.step()
        if not scheduler.num_preempted:
            break
    lagging.backpressured = True
    while not scheduler.num_preempted and len(others[-1].tokens) < MAX_TOKENS:
        scheduler.step()
    assert list(scheduler.waiting) == [lagging]
    lagging.backpressured = False
    finish(scheduler)
    assert {i: s.tokens[:MAX_TOKENS] for i, s in zip(expected, asked, strict=True)} == expected
