"""Prompts in segments: batch rows over the same pages give the tokens of whole prompts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.decode.pair import NUM_PAGES, PAGE_SIZE
from tests.decode.scheduling import MAX_TOKENS, TREES, finish, make_scheduler, pair, prompts, solo
from trt_eagle3.decode.forward import chunks as chunks_module
from trt_eagle3.decode.forward.segment import Segment, cut, last_segments
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.step import prefill


def test_cut_gives_every_row_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "MIN_SEGMENT", 4)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    some = [pair().sequence(prompts()[i], pool, drafting=True) for i in (3, 6)]  # 17 and 33 rows
    segments = cut([(some[0], 12), (some[1], 8)])
    assert [(s.start, s.count, s.is_last) for s in segments] == [
        (0, 4, False), (4, 4, False), (8, 4, True), (0, 4, False), (4, 4, True)
    ]  # fmt: skip
    assert [s.sequence is some[1] for s in segments] == [False] * 3 + [True] * 2
    assert last_segments(segments) == [2, 4]
    whole = [Segment(some[0], 0, 12), Segment(some[1], 0, 8)]
    assert cut([(some[0], 12), (some[1], 8)], max_segments=0) == whole


@pytest.mark.parametrize("mode", TREES)
def test_prompts_in_segments_get_the_answers_that_they_get_alone(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text and images, so short that they share a forward, cut into segments of 3 rows or more."""
    monkeypatch.setattr(chunks_module, "MIN_SEGMENT", 3)
    seen: list[tuple[int, int]] = []

    def counted(chunks: Any, max_segments: int | None) -> list[Segment]:
        segments = cut(chunks, max_segments)
        seen.append((len(chunks), len(segments)))
        return segments

    monkeypatch.setattr(prefill, "cut", counted)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, PrefixCache(pool), lambda _: TREES[mode], chunk=40)
    sequences = [pair().sequence(prompt, pool, drafting=True) for prompt in prompts()]
    for sequence in sequences:
        scheduler.add(sequence)
    finish(scheduler)
    assert [s.tokens[:MAX_TOKENS] for s in sequences] == [solo(i) for i in range(len(sequences))]
    assert any(segments > prompts > 1 for prompts, segments in seen)
