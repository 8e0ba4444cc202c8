"""Rows of the next prefill: who takes part, with how many, and in which segments."""

from __future__ import annotations

import random

import pytest

from trt_eagle3.decode.forward.chunks import (
    MIN_SEGMENT,
    chunk_rows,
    prefill_budget,
    segment_width,
)


def padded_rows(counts: list[int], max_segments: int | None = None) -> int:
    width = segment_width(counts, max_segments)
    return width * sum(-(-n // width) for n in counts)


def forwards(remaining: list[int], budget: int) -> list[list[int]]:
    """The rows of all prefills until nothing remains."""
    left, found = dict(enumerate(remaining)), []
    while left:
        ids = [*left]
        rows = chunk_rows([*left.values()], budget)
        for i, count in rows.items():
            left[ids[i]] -= count
        left = {i: n for i, n in left.items() if n}
        found.append([*rows.values()])
    return found


def test_chunk_rows_of_one_prompt_are_the_whole_budget() -> None:
    assert chunk_rows([5000], 2048) == {0: 2048}
    assert chunk_rows([952], 2048) == {0: 952}
    assert chunk_rows([], 2048) == {}


def test_chunk_rows_of_equal_prompts_are_whole_prompts_the_oldest_first() -> None:
    assert chunk_rows([1024] * 32, 2048) == {0: 1024, 1: 1024}
    assert chunk_rows([2048, 2048], 2048) == {0: 2048}


def test_chunk_rows_short_prompt_takes_the_likes_of_it_along() -> None:
    assert chunk_rows([100, 2000, 97, 20, 101], 512) == {0: 100, 2: 97, 4: 101}


@pytest.mark.parametrize("max_segments", [None, 0, 1, 4])
@pytest.mark.parametrize("budget", [1, 7, 512, 2048])
def test_chunk_rows_fit_the_budget_and_the_oldest_gets_some(
    budget: int, max_segments: int | None
) -> None:
    draw = random.Random(budget)
    for _ in range(50):
        remaining = [draw.randint(1, 3000) for _ in range(draw.randint(1, 40))]
        rows = chunk_rows(remaining, budget, max_segments)
        assert 0 in rows
        assert padded_rows([*rows.values()], max_segments) <= budget
        assert all(1 <= n <= remaining[i] for i, n in rows.items())
        assert len(rows) <= (max_segments or len(remaining))


@pytest.mark.parametrize(("shortest", "longest"), [(50, 1500), (50, 500), (300, 6000)])
def test_chunk_rows_of_ragged_prompts_are_hardly_padded(shortest: int, longest: int) -> None:
    """In the order of arrival, each padded to the widest, the first two are 13 and 44 % more."""
    draw = random.Random(0)
    remaining = [draw.randint(shortest, longest) for _ in range(64)]
    found = forwards(remaining, 2048)
    assert sum(map(sum, found)) == sum(remaining)
    assert sum(map(padded_rows, found)) < 1.06 * sum(remaining)


def test_segment_width_cuts_long_prompts_to_what_pads_least() -> None:
    assert segment_width([1207, 784]) == 403  # 3 and 2 segments, 24 rows of padding
    assert segment_width([1024, 1024]) == 1024
    assert segment_width([1207, 784], max_segments=0) == 1207
    assert segment_width([1207, 784], max_segments=2) == 1207


def test_segment_width_of_several_segments_is_at_least_what_kernels_take() -> None:
    draw = random.Random(1)
    for _ in range(200):
        counts = [draw.randint(1, 2000) for _ in range(draw.randint(1, 9))]
        width = segment_width(counts)
        assert width >= MIN_SEGMENT or width >= max(counts)


def test_prefill_budget_is_what_fits_in_time_but_no_less_than_weights_take() -> None:
    assert prefill_budget(4096, None) == 4096
    assert prefill_budget(4096, 10_000) == 4096
    assert prefill_budget(4096, 1500) == 1500
    assert prefill_budget(4096, 0) == 256
    assert prefill_budget(64, 0) == 64
