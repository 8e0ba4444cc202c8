"""Pages of past prompts: reused where a prompt begins alike, and nowhere else; evicted in the
right order.
"""

from __future__ import annotations

import dataclasses
import random
import time

import pytest
import torch

from tests.decode.pair import NUM_PAGES, PAGE_SIZE, VOCAB, make_prompt, run
from tests.decode.scheduling import (
    CHAIN,
    LAYOUTS,
    MAX_SEQ_LEN,
    MAX_TOKENS,
    finish,
    make_scheduler,
    pair,
    prompts,
    solo,
)
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.prefix_cache import PrefixCache, page_keys
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.request.prompt import Prompt, media_digests
from trt_eagle3.multimodal import PixelPatches


def reused(*asked: Prompt, drafting: tuple[bool, ...] = (True, True)) -> tuple[int, list[int]]:
    """Rows that the last of ``asked`` took over from those before it, and what it said."""
    pool = PagePool(2 * NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, PrefixCache(pool), lambda _: CHAIN)
    for prompt, drafts in zip(asked, drafting, strict=True):
        s = pair().sequence(prompt, pool, drafting=drafts)
        before = scheduler.num_reused_rows
        scheduler.add(s)
        output_ids = finish(scheduler)
    return scheduler.num_reused_rows - before, output_ids[id(s)][:MAX_TOKENS]


@pytest.mark.parametrize("index", range(len(LAYOUTS)))
def test_prompt_that_comes_again_reuses_all_its_whole_pages_but_the_last_row(index: int) -> None:
    expected = solo(index)
    rows, output_ids = reused(prompts()[index], prompts()[index])
    assert rows == (len(prompts()[index].token_ids) - 1) // PAGE_SIZE * PAGE_SIZE
    assert output_ids == expected


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
    expected = run(pair(), second, None, num_tokens=MAX_TOKENS, max_seq_len=MAX_SEQ_LEN).tokens[
        :MAX_TOKENS
    ]
    blind = second.with_vision(None)  # whose embeddings nobody can ask for
    rows, output_ids = reused(first, blind)
    # of the 18 of the first prompt; what it said after them is not what the second one goes on with
    assert rows == 16
    assert output_ids == expected


def test_another_image_at_the_same_place_is_not_reused() -> None:
    first = prompts()[1]
    other = make_prompt(pair(), LAYOUTS[1], seed=3)
    other = dataclasses.replace(
        other, token_ids=first.token_ids, media=((b"another", first.media[0][1]), first.media[1])
    )
    expected = run(pair(), other, None, num_tokens=MAX_TOKENS, max_seq_len=MAX_SEQ_LEN).tokens[
        :MAX_TOKENS
    ]
    rows, output_ids = reused(first, other)
    assert rows == 0  # the image begins within the first page
    assert output_ids == expected


def test_digest_of_an_image_is_of_its_pixels_its_table_and_its_grid_and_of_nothing_else() -> None:
    pixels = torch.randint(0, 256, (16, 3, 1, 4), dtype=torch.uint8)
    image = PixelPatches(pixels, torch.rand(3, 256), (1, 4, 4), 2)
    [(digest, rows)] = media_digests([image], 4)
    assert rows == 4
    assert media_digests([dataclasses.replace(image, pixels=pixels.clone())], 4) == ((digest, 4),)
    brighter, darker = pixels.clone(), image.table.clone()
    brighter[15, 2, 0, 3] ^= 1
    darker[2, 255] += 1
    for other in (
        dataclasses.replace(image, pixels=brighter),
        dataclasses.replace(image, table=darker),
        dataclasses.replace(image, grid=(1, 2, 8)),  # the same patches, otherwise laid out
        dataclasses.replace(image, temporal_patch_size=1),
    ):
        assert media_digests([image, other], 4)[1][0] != digest


@pytest.mark.parametrize(
    ("drafting", "expected"),
    [
        ((False, True), 0),  # the draft's rows are missing
        ((False, False), 16),
        ((True, False), 16),
        ((False, True, True), 16),  # those of the second one have taken their place
        ((False, True, False), 16),
        ((True, False, True), 16),
    ],
)
def test_pages_that_no_draft_has_filled_serve_only_sequences_that_none_follows(
    drafting: tuple[bool, ...], expected: int
) -> None:
    asked = [prompts()[3]] * len(drafting)
    rows, output_ids = reused(*asked, drafting=drafting)
    assert rows == expected
    assert output_ids == solo(3)


def test_page_that_a_draft_has_filled_takes_the_place_of_one_that_none_has() -> None:
    pool = PagePool(8, PAGE_SIZE)
    prefixes = PrefixCache(pool)
    plain, drafted, again = pool.take(2), pool.take(2), pool.take(2)
    keys = [b"0", b"1"]
    prefixes.insert(keys, plain)
    pool.give_back(plain[1:])  # the first one is still in use
    prefixes.insert(keys, drafted, drafted=True)
    assert (pool.owners(plain[0]), pool.owners(plain[1])) == (1, 0)
    prefixes.insert(keys[:1], plain[:1])
    prefixes.insert(keys, again, drafted=True)
    assert prefixes.match(keys, drafted=True).pages == tuple(drafted)
    assert prefixes.match(keys).pages == tuple(drafted)
    pool.give_back([plain[0], *drafted, *again])
    prefixes.clear()
    assert pool.num_free == 7
    prefixes.insert(keys, drafted := pool.take(2))
    assert prefixes.match(keys).pages == tuple(drafted)
    assert not prefixes.match(keys, drafted=True).pages, "what a page was is forgotten with it"


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
    assert prefixes.match(keys).pages == tuple(pages[:3])
    prefixes.evict(10)
    assert prefixes.match(keys).pages == tuple(pages[:1])
    assert pool.num_free == 6


def test_evicting_a_page_costs_the_same_however_many_are_kept() -> None:
    """Two thousand of 40,000, one at a time: looking through all of them takes seconds."""
    pool = PagePool(40_001, PAGE_SIZE)
    prefixes = PrefixCache(pool)
    pages = pool.take(40_000)
    prefixes.insert([i.to_bytes(4) for i in range(len(pages))], pages)
    pool.give_back(pages[20_000:])  # the oldest half is in use
    start = time.thread_time()
    for _ in range(2000):
        prefixes.evict(1)
    assert time.thread_time() - start < 0.5
    assert (pool.num_free, prefixes.num_idle) == (2000, 18_000)


def test_page_keys_are_those_of_the_rows_alone() -> None:
    """However many are asked for, and after which others."""
    sequence = pair().sequence(prompts()[6], PagePool(NUM_PAGES, PAGE_SIZE), drafting=True)
    keys = page_keys(sequence, 8, PAGE_SIZE)
    more = page_keys(sequence, 33, PAGE_SIZE)
    assert more[: len(keys)] == keys
    again = pair().sequence(prompts()[6], PagePool(NUM_PAGES, PAGE_SIZE), drafting=True)
    assert page_keys(again, 33, PAGE_SIZE) == more
    assert page_keys(sequence, 33, PAGE_SIZE) == more
    assert page_keys(sequence, 9, PAGE_SIZE) == keys


def test_planted_fault_pages_known_by_their_length_alone_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = make_prompt(pair(), [9], seed=9)
    expected = run(pair(), other, None, num_tokens=MAX_TOKENS, max_seq_len=MAX_SEQ_LEN).tokens[
        :MAX_TOKENS
    ]
    assert reused(prompts()[3], other) == (0, expected)

    def by_length(sequence: SequenceState, num_rows: int, page_size: int) -> list[bytes]:
        count = min(num_rows, sequence.num_tokens - 1) // page_size
        return [bytes([page]) for page in range(count)]

    monkeypatch.setattr("trt_eagle3.decode.memory.prefix_cache.page_keys", by_length)
    _, output_ids = reused(prompts()[3], other)
    assert output_ids != expected


class _Copy:
    """A snapshot that knows what it is of, and is released once."""

    def __init__(self, key: bytes) -> None:
        self.key, self.released = key, False

    def release(self) -> None:
        assert not self.released
        self.released = True


class _Disturbed:
    """Sequences that begin, are remembered, and leave, in any order; what their pages hold is
    written down.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.pool = PagePool(14, PAGE_SIZE)
        self.cache = PrefixCache(self.pool)
        self.filled: dict[int, tuple[bytes, bool]] = {}  # by page: its key, whether by a draft too
        self.running: list[tuple[list[bytes], list[int], bool]] = []
        self.copies: list[_Copy] = []
        self.reused = self.replaced = 0

    def begin(self) -> None:
        drafted, hybrid = self.chance.random() < 0.3, self.chance.random() < 0.5
        start = self.chance.choice("abcdef")
        keys = [f"{start}{i}".encode() for i in range(self.chance.randint(1, 5))]
        found = self.cache.match(keys, with_snapshot=hybrid, drafted=drafted)
        pages = list(found.pages)
        assert [self.filled[page][0] for page in pages] == keys[: len(pages)]
        assert all(self.filled[page][1] >= drafted for page in pages), "no draft has filled it"
        if hybrid and pages:
            assert isinstance(found.snapshot, _Copy)
            assert (found.snapshot.key, found.snapshot.released) == (keys[len(pages) - 1], False)
        self.pool.share(pages)
        self.reused += len(pages)
        lacking = len(keys) - len(pages)
        if lacking > self.pool.num_free:
            self.cache.evict(lacking - self.pool.num_free)
        if lacking > self.pool.num_free:
            self.pool.give_back(pages)
            return
        new = self.pool.take(lacking)
        pages += new
        self.filled |= {
            page: (key, drafted) for page, key in zip(pages, keys, strict=True) if page in new
        }
        self.running.append((keys, pages, drafted))

    def remember(self) -> None:
        keys, pages, drafted = self.chance.choice(self.running)
        count = self.chance.randint(1, len(keys))
        ends = [n for n in range(1, count + 1) if self.chance.random() < 0.3]
        copies = {n: _Copy(keys[n - 1]) for n in ends}
        self.copies += copies.values()
        before = dict(self.cache._pages)
        self.cache.insert(keys[:count], pages[:count], copies, drafted=drafted)
        self.replaced += any(self.cache._pages[key] != page for key, page in before.items())

    def leave(self) -> None:
        self.chance.shuffle(self.running)
        self.pool.give_back(self.running.pop()[1])

    def step(self) -> None:
        busy = [self.remember, self.remember, self.leave] if self.running else []
        common = [self.begin, self.begin, *busy] * 8
        self.chance.choice([*common, self.cache.evict_snapshot, lambda: self.cache.evict(1)])()
        used = {page for _, pages, _ in self.running for page in pages}
        kept = set(self.cache._pages.values())
        assert self.pool.num_used == len(used | kept)
        assert self.pool.num_idle == len(kept - used)
        for page in used | kept:
            owners = sum(page in pages for _, pages, _ in self.running)
            assert self.pool.owners(page) == owners + (page in kept)
        assert self.cache._drafted == {page for page in kept if self.filled[page][1]}
        assert self.cache.num_snapshots == sum(not copy.released for copy in self.copies)


@pytest.mark.parametrize("seed", range(4))
def test_pages_that_are_kept_replaced_and_evicted_in_any_order_hold_what_they_are_known_for(
    seed: int,
) -> None:
    run = _Disturbed(seed)
    for _ in range(1500):
        run.step()
    assert run.reused > 100
    assert run.replaced > 3
    while run.running:
        run.leave()
    run.cache.clear()
    assert run.pool.num_used == 0
    assert all(copy.released for copy in run.copies)
