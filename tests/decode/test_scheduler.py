"""The scheduler under any sequence of events: no page lost or written by two, and every answer as if it were alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.decode.pair import NUM_PAGES, PAGE_SIZE, PREFILL_CHUNK, VOCAB, Pair, Recorder, make_pair, make_prompt, run
from trt_eagle3.checkpoint.rope import RopeSpec
from trt_eagle3.decode import decoder as decoder_module
from trt_eagle3.decode.decoder import AnyTree, Decoder
from trt_eagle3.decode.dynamic_tree import DynamicTree
from trt_eagle3.decode.kv_cache import PagePool
from trt_eagle3.decode.prefix_cache import PrefixCache, page_keys
from trt_eagle3.decode.prompt import Prompt
from trt_eagle3.decode.sampling import Sampling
from trt_eagle3.decode.scheduler import Emission, Scheduler
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.decode.tree import Tree
from trt_eagle3.errors import EngineFailedError

MAX_SEQ_LEN, MAX_TOKENS, MAX_BATCH = 48, 14, 3
CHAIN = Tree.from_paths([(0,), (0, 0), (0, 0, 0)])
BUSHY = Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])
TREES: dict[str, AnyTree | None] = {"plain": None, "chain": CHAIN, "bushy": BUSHY, "dynamic": DynamicTree(3, 3, 8)}
LAYOUTS: list[list[Any]] = [[9], [3, (2, 3), 2, (2, 2), 3], [1], [17], [3, (2, 3), 2, (2, 2), 9], [4, (2, 2), 1], [33]]


@cache
def pair() -> Pair:
    rope = RopeSpec.plain(8, 1e4, "interleaved", (2, 1, 1))
    directory = Path(mkdtemp(prefix="trt-eagle3-test-"))  # seed 0 says many different tokens
    return make_pair(directory, seed=0, rope=rope, image_rows="vision", position_shift=1)


@cache
def prompts() -> tuple[Prompt, ...]:
    """Prompts of every kind; some begin alike, in text or in their images."""
    found = []
    for layout in LAYOUTS:
        prompt = make_prompt(pair(), layout, seed=1)
        counts = [part[0] * part[1] for part in layout if isinstance(part, tuple)]
        rows = prompt.vision.embeds.split(counts)
        media = tuple((r.numpy().tobytes(), len(r)) for r in rows)
        found.append(dataclasses.replace(prompt, media=media))
    return tuple(found)


@cache
def solo(index: int) -> list[int]:
    prompt = prompts()[index]
    return run(pair(), prompt, None, num_tokens=MAX_TOKENS, max_seq_len=MAX_SEQ_LEN).tokens[:MAX_TOKENS]


def make_scheduler(
    pool: PagePool, prefixes: PrefixCache | None, tree_for: Callable[[int], AnyTree | None], chunk: int = PREFILL_CHUNK
) -> Scheduler:
    decoder: Decoder = pair().decoder(Recorder(), MAX_SEQ_LEN, pair().drafting(Recorder()))
    decoder.prefill_chunk = chunk
    return Scheduler(decoder, pool, max_batch_size=MAX_BATCH, tree_for=tree_for, prefix_cache=prefixes)


@dataclass(eq=False)
class Asked:
    index: int
    sequence: SequenceState
    limit: int
    said: list[int] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    """Requests come and go, readers stall, pages run out."""

    @initialize(cached=st.booleans())
    def begin(self, cached: bool) -> None:
        for index in range(len(LAYOUTS)):
            solo(index)  # before this scheduler's caches are bound
        self.pool = PagePool(NUM_PAGES, PAGE_SIZE)
        self.prefixes = PrefixCache(self.pool) if cached else None
        self.tree: AnyTree | None = None
        self.scheduler = make_scheduler(self.pool, self.prefixes, lambda _: self.tree)
        self.asked: list[Asked] = []
        self.held: list[int] = []

    @rule(index=st.integers(0, len(LAYOUTS) - 1), drafting=st.booleans(), limit=st.integers(1, MAX_TOKENS))
    def submit(self, index: int, drafting: bool, limit: int) -> None:
        sequence = pair().sequence(prompts()[index], self.pool, drafting=drafting)
        self.asked.append(Asked(index, sequence, limit))
        self.scheduler.add(sequence)

    @rule(tree=st.sampled_from(sorted(TREES)), times=st.integers(1, 4))
    def step(self, tree: str, times: int) -> None:
        self.tree = TREES[tree]
        for _ in range(times):
            for emission in self.scheduler.step():
                self.take(emission)

    def take(self, emission: Emission) -> None:
        asked = next(a for a in self.asked if a.sequence is emission.sequence)
        assert emission.error is None
        assert asked.sequence.paused is False
        asked.said += emission.tokens
        if len(asked.said) >= asked.limit or emission.full:
            expected = solo(asked.index)
            assert asked.said[: asked.limit] == expected[: asked.limit]
            self.scheduler.remove(asked.sequence)
            self.asked.remove(asked)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        asked = data.draw(st.sampled_from(self.asked))
        self.scheduler.remove(asked.sequence)
        self.asked.remove(asked)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), paused=st.booleans())
    def stall(self, data: Any, paused: bool) -> None:
        data.draw(st.sampled_from(self.asked)).sequence.paused = paused

    @rule(count=st.integers(1, 20))
    def press(self, count: int) -> None:
        self.held += self.pool.take(min(count, self.pool.num_free))

    @rule()
    def relax(self) -> None:
        self.pool.give_back(self.held)
        self.held = []

    @invariant()
    def pages_are_owned_by_those_who_say_so(self) -> None:
        if not hasattr(self, "pool"):
            return
        owners = Counter(self.held)
        for asked in self.asked:
            owners.update(asked.sequence.pages.held)
        if self.prefixes is not None:
            kept = self.prefixes._pages.values()
            owners.update(kept)
            assert self.prefixes.num_idle == sum(owners[page] == 1 for page in kept)
        every = range(1, NUM_PAGES)
        assert {page: self.pool.owners(page) for page in every} == {page: owners[page] for page in every}
        assert sorted(self.pool._free) == [page for page in every if not owners[page]]

    @invariant()
    def nobody_writes_into_a_page_of_others(self) -> None:
        for asked in getattr(self, "asked", []):
            s = asked.sequence
            own = s.pages.held[s.length // PAGE_SIZE :]
            assert all(self.pool.owners(page) == 1 for page in own)

    @invariant()
    def draft_holds_as_many_rows_as_the_target_or_knows_what_it_lacks(self) -> None:
        for asked in getattr(self, "asked", []):
            s = asked.sequence
            if s.drafting:
                assert s.draft_length + len(s.deferred) == s.length
            if s.draft is not None:
                assert s.draft.length == s.draft_length
            if s not in self.scheduler.running:
                assert (s.length, len(s.pages.held), s.draft) == (0, 0, None)

    def teardown(self) -> None:
        """Without pressure everybody gets an answer, and every page comes back."""
        if not hasattr(self, "pool"):
            return
        self.relax()
        for asked in self.asked:
            asked.sequence.paused = False
        for _ in range(60 * (1 + len(self.asked))):
            if self.asked:
                self.step("bushy", 1)
        assert self.asked == []
        if self.prefixes is not None:
            self.prefixes.clear()
        assert self.pool.num_free == NUM_PAGES - 1


Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestMachine = Machine.TestCase


def finish(scheduler: Scheduler, limit: int = MAX_TOKENS) -> dict[int, list[int]]:
    """Tokens of every sequence by ``id``, stepped until nobody is left."""
    said: dict[int, list[int]] = {}
    while scheduler.running or scheduler.waiting:
        for emission in scheduler.step():
            assert emission.error is None
            tokens = said.setdefault(id(emission.sequence), [])
            tokens += emission.tokens
            if len(tokens) >= limit or emission.full:
                scheduler.remove(emission.sequence)
    return said


@pytest.mark.parametrize("tree", TREES)
def test_batch_of_mixed_sequences_says_what_each_says_alone(tree: str) -> None:
    expected = [solo(i) for i in range(len(LAYOUTS))]
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, None, lambda _: TREES[tree])
    asked = [pair().sequence(p, pool, drafting=i != 2) for i, p in enumerate(prompts())]
    for s in asked:
        scheduler.add(s)
    said = finish(scheduler)
    assert [said[id(s)][:MAX_TOKENS] for s in asked] == expected
    assert pool.num_free == pool.num_pages - 1


def test_long_prompt_stalls_nobody_for_longer_than_a_chunk() -> None:
    solo(0)
    scheduler = make_scheduler(PagePool(NUM_PAGES, PAGE_SIZE), None, lambda _: None)
    pool = scheduler._pool
    short, long = (pair().sequence(prompts()[i], pool) for i in (0, 6))
    scheduler.add(short)
    while not short.tokens:
        scheduler.step()
    scheduler.add(long)
    for _ in range(-(-33 // PREFILL_CHUNK)):
        before = long.length
        assert [e.sequence for e in scheduler.step() if e.sequence is short] == [short]
        assert long.length - before <= PREFILL_CHUNK
    assert long.prefilled


def test_short_prompts_share_a_prefill_pass() -> None:
    solo(0)
    scheduler = make_scheduler(PagePool(NUM_PAGES, PAGE_SIZE), None, lambda _: None, chunk=64)
    asked = [pair().sequence(prompts()[i], scheduler._pool) for i in (0, 1, 3)]
    for s in asked:
        scheduler.add(s)
    scheduler.step()
    assert [s.prefilled for s in asked] == [True, True, True]


def test_pages_that_run_out_put_off_who_came_last_and_nobody_notices() -> None:
    expected = {i: solo(i) for i in (3, 4)}
    scheduler = make_scheduler(PagePool(17, PAGE_SIZE), None, lambda _: BUSHY)  # 16 pages: both begin, one can end
    asked = {i: pair().sequence(prompts()[i], scheduler._pool, drafting=True) for i in (3, 4)}
    for s in asked.values():
        scheduler.add(s)
    said = finish(scheduler)
    assert scheduler.num_preempted >= 1
    assert {i: said[id(s)][:MAX_TOKENS] for i, s in asked.items()} == expected


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
        said = scheduler.step()
        for s in scheduler.running:
            if id(s) not in before:
                assert len(s.tokens) > admitted.get(id(s), -1)
                admitted[id(s)] = len(s.tokens)
        for emission in said:
            if len(emission.sequence.tokens) >= MAX_TOKENS:
                scheduler.remove(emission.sequence)
    assert scheduler.num_preempted >= 1


def test_sampled_sequence_that_was_put_off_goes_on_with_its_random_numbers() -> None:
    """Alone and put off midway, the same seed says the same."""
    sampling = Sampling(temperature=1.5, seed=5, repetition_penalty=1.3)
    answers = []
    for interrupted in (False, True):
        scheduler = make_scheduler(PagePool(NUM_PAGES, PAGE_SIZE), None, lambda _: CHAIN)
        s = SequenceState(prompts()[0], scheduler._pool, VOCAB, sampling, drafting=True)
        scheduler.add(s)
        for step in itertools.count():
            scheduler.step()
            if interrupted and step == 4:
                scheduler._preempt(s)
            if len(s.tokens) >= MAX_TOKENS:
                break
        answers.append(s.tokens[:MAX_TOKENS])
    assert answers[0] == answers[1]


def reused(first: Prompt, second: Prompt, *, drafting: tuple[bool, bool] = (True, True)) -> tuple[int, list[int]]:
    """Rows that ``second`` took over from ``first``, and what it said."""
    pool = PagePool(2 * NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, PrefixCache(pool), lambda _: CHAIN)
    for prompt, drafts in zip((first, second), drafting, strict=True):
        s = pair().sequence(prompt, pool, drafting=drafts)
        before = scheduler.num_reused_rows
        scheduler.add(s)
        said = finish(scheduler)
    return scheduler.num_reused_rows - before, said[id(s)][:MAX_TOKENS]


@pytest.mark.parametrize("index", range(len(LAYOUTS)))
def test_prompt_that_comes_again_reuses_all_its_whole_pages_but_the_last_row(index: int) -> None:
    expected = solo(index)
    rows, said = reused(prompts()[index], prompts()[index])
    assert rows == (len(prompts()[index].token_ids) - 1) // PAGE_SIZE * PAGE_SIZE
    assert said == expected


def continued(prompt: Prompt, token_ids: list[int]) -> Prompt:
    """``prompt`` with more text behind."""
    count, more = len(prompt.token_ids), len(token_ids)
    return dataclasses.replace(
        prompt,
        token_ids=torch.cat([prompt.token_ids, torch.tensor(token_ids)]),
        position_ids=prompt.positions(0, count + more),
        visual_rows=torch.cat([prompt.visual_rows, torch.zeros(more, dtype=torch.bool)]),
    )


def test_prompts_that_begin_with_the_same_images_share_their_pages() -> None:
    first = prompts()[1]
    second = continued(first, [3, 1, 4, 1, 5, 9])
    expected = run(pair(), second, None, num_tokens=MAX_TOKENS, max_seq_len=MAX_SEQ_LEN).tokens[:MAX_TOKENS]
    seen: list[int] = []
    blind = dataclasses.replace(second, see=lambda: seen.append(1))
    rows, said = reused(first, blind)
    assert rows == 16  # of the 18 of the first prompt; what it said after them is not what the second one goes on with
    assert said == expected
    assert not seen, "all visual rows are in reused pages: the vision tower need not run"


def test_another_image_at_the_same_place_is_not_reused() -> None:
    first = prompts()[1]
    other = make_prompt(pair(), LAYOUTS[1], seed=3)
    other = dataclasses.replace(
        other, token_ids=first.token_ids, media=((b"another", first.media[0][1]), first.media[1])
    )
    expected = run(pair(), other, None, num_tokens=MAX_TOKENS, max_seq_len=MAX_SEQ_LEN).tokens[:MAX_TOKENS]
    rows, said = reused(first, other)
    assert rows == 0  # the image begins within the first page
    assert said == expected


def test_plain_pages_are_not_reused_by_a_sequence_that_drafts() -> None:
    rows, said = reused(prompts()[3], prompts()[3], drafting=(False, True))
    assert rows == 0
    rows, said = reused(prompts()[3], prompts()[3], drafting=(False, False))
    assert rows == 16
    assert said == solo(3)


def test_page_is_not_known_without_the_row_after_it() -> None:
    """The draft's last row of a page has the embedding of the next token."""
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    first = prompts()[3]
    ids = first.token_ids.clone()
    ids[PAGE_SIZE] = (ids[PAGE_SIZE] + 1) % VOCAB
    keys = [
        page_keys(pair().sequence(p, pool, drafting=True), 12, PAGE_SIZE)
        for p in (first, dataclasses.replace(first, token_ids=ids))
    ]
    assert keys[0][0] != keys[1][0]


def test_eviction_takes_the_end_of_a_prompt_first_and_never_a_page_in_use() -> None:
    pool = PagePool(8, PAGE_SIZE)
    prefixes = PrefixCache(pool)
    pages = pool.take(4)
    keys = [bytes([i]) for i in range(4)]
    prefixes.insert(keys, pages)
    pool.give_back(pages[1:])  # the first one is still in use
    prefixes.evict(1)
    assert prefixes.match(keys) == pages[:3]
    prefixes.evict(10)
    assert prefixes.match(keys) == pages[:1]
    assert pool.num_free == 6


def test_evicting_a_page_costs_the_same_however_many_are_kept() -> None:
    """Counted, not timed: nothing looks through what is kept."""

    class Counted(OrderedDict[Any, Any]):
        looks = 0

        def __iter__(self) -> Iterator[Any]:
            for key in super().__iter__():
                Counted.looks += 1
                yield key

    pool = PagePool(2000, PAGE_SIZE)
    prefixes = PrefixCache(pool)
    pages = pool.take(1999)
    prefixes.insert([bytes(divmod(i, 256)) for i in range(len(pages))], pages)
    pool.give_back(pages[1000:])  # the oldest half is in use
    pool._idle = Counted(pool._idle)
    Counted.looks = 0
    prefixes.evict(3)
    assert (pool.num_free, prefixes.num_idle) == (3, 996)
    assert Counted.looks <= 4


def test_page_keys_are_made_once() -> None:
    """A prompt that waits for pages asks for its keys at every step."""
    sequence = pair().sequence(prompts()[6], PagePool(NUM_PAGES, PAGE_SIZE), drafting=True)
    keys = page_keys(sequence, 8, PAGE_SIZE)
    more = page_keys(sequence, 33, PAGE_SIZE)
    assert more[: len(keys)] == keys
    again = pair().sequence(prompts()[6], PagePool(NUM_PAGES, PAGE_SIZE), drafting=True)
    assert page_keys(again, 33, PAGE_SIZE) == more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hashlib.sha256", None)
        assert page_keys(sequence, 33, PAGE_SIZE) == more
    assert page_keys(sequence, 9, PAGE_SIZE) == keys


def test_picture_that_cannot_be_seen_fails_its_own_request_only() -> None:
    expected = solo(0)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, PrefixCache(pool), lambda _: CHAIN)

    def blind() -> Any:
        raise RuntimeError("out of memory")

    bad = pair().sequence(dataclasses.replace(prompts()[1], see=blind), pool, drafting=True)
    good = pair().sequence(prompts()[0], pool, drafting=True)
    scheduler.add(bad)
    scheduler.add(good)
    failed = [e for e in scheduler.step() if e.error is not None]
    assert [(e.sequence, str(e.error)) for e in failed] == [(bad, "out of memory")]
    assert finish(scheduler)[id(good)][:MAX_TOKENS] == expected
    assert pool.num_used == len(scheduler._prefixes or ())


def test_cycles_wait_for_one_prompts_pictures_at_a_time_and_nobody_keeps_them() -> None:
    expected = {i: solo(i) for i in (2, 1, 5)}
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, None, lambda _: CHAIN, chunk=64)
    seen: list[int] = []

    def looking(index: int) -> Prompt:
        prompt = prompts()[index]

        def see() -> Any:
            seen.append(index)
            return prompt.vision

        return dataclasses.replace(prompt, see=see)

    asked = {i: pair().sequence(looking(i), pool, drafting=True) for i in expected}
    scheduler.add(asked[2])
    scheduler.step()
    for i in (1, 5):
        scheduler.add(asked[i])
    for i in (1, 2):
        assert asked[2] in [e.sequence for e in scheduler.step()]
        assert seen == [1, 5][:i]
    assert all(s.prefilled and "vision" not in vars(s.prompt) for s in asked.values())
    scheduler._preempt(asked[5])
    finish(scheduler)
    assert {i: s.tokens[:MAX_TOKENS] for i, s in asked.items()} == expected
    assert seen == [1, 5, 5], "computed again, it looks again"


def test_planted_fault_pages_known_by_their_length_alone_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_prompt(pair(), [9], seed=9)
    expected = run(pair(), other, None, num_tokens=MAX_TOKENS, max_seq_len=MAX_SEQ_LEN).tokens[:MAX_TOKENS]
    assert reused(prompts()[3], other) == (0, expected)

    def by_length(sequence: SequenceState, num_rows: int, page_size: int) -> list[bytes]:
        count = min(num_rows, sequence.num_tokens - 1) // page_size
        return [bytes([page]) for page in range(count)]

    monkeypatch.setattr("trt_eagle3.decode.scheduler.page_keys", by_length)
    _, said = reused(prompts()[3], other)
    assert said != expected


@pytest.mark.parametrize("when", ["prefill", "decode"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_sequence_whose_logits_are_no_numbers_fails_alone(
    when: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = solo(0)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, PrefixCache(pool), lambda _: CHAIN)
    good, bad = (pair().sequence(prompts()[i], pool, drafting=True) for i in (0, 3))
    say_first, judge = Decoder._say_first, decoder_module.judge

    def overflow_first(self: Decoder, chunks: Any, logits: torch.Tensor) -> None:
        logits[[s is bad for s, _ in chunks], 1] = value
        say_first(self, chunks, logits)

    def overflow(sequences: Any, proposal: Any, logits: torch.Tensor, counts: Any) -> Any:
        logits[[s is bad for s in sequences], -1, 1] = value
        return judge(sequences, proposal, logits, counts)

    scheduler.add(good)
    while not good.prefilled:
        scheduler.step()
    scheduler.add(bad)
    if when == "prefill":
        monkeypatch.setattr(Decoder, "_say_first", overflow_first)
    else:
        monkeypatch.setattr(decoder_module, "judge", overflow)
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
    scheduler = make_scheduler(PagePool(NUM_PAGES, PAGE_SIZE), None, lambda _: CHAIN)
    s = pair().sequence(prompts()[6], scheduler._pool, drafting=True)
    scheduler.add(s)
    scheduler.step()
    s.paused = True
    assert scheduler.idle
    assert scheduler.step() == []
    assert s.length == PREFILL_CHUNK


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
        s.paused = True
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
        s.paused = False
    finish(scheduler)
    assert {i: s.tokens[:MAX_TOKENS] for i, s in asked.items()} == expected
