"""Pages of past prompts: reused where a prompt begins alike, and nowhere else; evicted in the
right order.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

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
from trt_eagle3.decode.kv_cache import PagePool
from trt_eagle3.decode.prefix_cache import PrefixCache, media_digests, page_keys
from trt_eagle3.decode.prompt import Prompt
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.multimodal import PixelPatches


def reused(
    first: Prompt, second: Prompt, *, drafting: tuple[bool, bool] = (True, True)
) -> tuple[int, list[int]]:
    """Rows that ``second`` took over from ``first``, and what it said."""
    pool = PagePool(2 * NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, PrefixCache(pool), lambda _: CHAIN)
    for prompt, drafts in zip((first, second), drafting, strict=True):
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


def test_plain_pages_are_not_reused_by_a_sequence_that_drafts() -> None:
    rows, output_ids = reused(prompts()[3], prompts()[3], drafting=(False, True))
    assert rows == 0
    rows, output_ids = reused(prompts()[3], prompts()[3], drafting=(False, False))
    assert rows == 16
    assert output_ids == solo(3)


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

    monkeypatch.setattr("trt_eagle3.decode.prefix_cache.page_keys", by_length)
    _, output_ids = reused(prompts()[3], other)
    assert output_ids != expected
