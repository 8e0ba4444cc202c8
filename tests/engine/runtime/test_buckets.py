"""Padded sizes: few, near to the counts, and the same for all who pad and capture."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_eagle3.engine.runtime.buckets import (
    BATCH_SIZES,
    PATCHES,
    PROMPT_WIDTHS,
    PROMPTS,
    ROWS,
    Buckets,
    batch_sizes,
    padded_size,
    power_of_two,
    warm_widths,
)


def test_buckets_count_above_the_last_limit_is_not_padded() -> None:
    buckets = Buckets(((4, 2), (12, 6)))
    assert [buckets.size_of(n) for n in (1, 2, 4, 5, 7, 12, 13)] == [2, 2, 4, 6, 12, 12, 13]
    assert buckets.sizes(12) == [2, 4, 6, 12]


def test_batches_are_padded_to_few_sizes_and_by_a_fifth_at_most_beyond_16() -> None:
    sizes = [padded_size(n, 256) for n in range(1, 257)]
    assert all(size >= n for n, size in enumerate(sizes, start=1))
    assert len(set(sizes)) == 24
    assert all(size <= 1.34 * n for n, size in enumerate(sizes, start=1))
    assert padded_size(129, 256) == 160


def test_batches_are_padded_to_no_more_than_an_engine_is_built_for() -> None:
    assert [padded_size(n, 5) for n in range(1, 6)] == [1, 2, 3, 4, 5]
    assert batch_sizes(130) == [*BATCH_SIZES, 130]
    by_hand = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
    assert by_hand == BATCH_SIZES


def test_rows_of_pieces_are_few_and_padded_by_a_quarter_at_most() -> None:
    counts = ROWS.sizes(ROWS.limit)
    assert counts[-1] == ROWS.limit == 4096
    assert len(counts) == 44
    assert all(ROWS.size_of(n) == n for n in counts)
    for count in range(1, ROWS.limit + 1):
        assert count <= ROWS.size_of(count) < max(count + 32, count * 5 / 4)


def test_widths_of_prompts_are_few_and_run_ahead_up_to_1024() -> None:
    """Padding is less than a half up to 64 rows, and less than 64 beyond."""
    assert PROMPT_WIDTHS == (32, 64, 128, 192, 256)
    widths = [PROMPTS.size_of(count) for count in range(1, 4097)]
    assert all(0 <= width - n < max(64, 32 - n + 1) for n, width in enumerate(widths, 1))
    assert len(set(widths)) == 65
    for room in (20, 256, 1000, 2048, 4096):
        ahead = warm_widths(room)
        assert ahead == sorted(set(ahead), reverse=True)
        assert ahead[0] == room
        wanted = {width for width in widths[: min(room, 1024)] if width <= room}
        assert wanted <= set(ahead)
    assert len(warm_widths(4096)) == 29


@pytest.mark.parametrize("room", [0, 1, 20])
def test_width_that_runs_ahead_is_never_of_no_rows(room: int) -> None:
    """Where every page is in use, no prompt runs."""
    assert warm_widths(room) == [room] * (room > 0)


@given(st.integers(1, 3000))
def test_patches_are_padded_by_an_eighth_at_most_and_large_images_not_at_all(count: int) -> None:
    size = PATCHES.size_of(count)
    assert count <= size < count + max(64, count / 8)
    assert PATCHES.size_of(size) == size
    assert count <= 2048 or size == count


@given(st.integers(1, 5000))
def test_power_of_two_is_the_next(count: int) -> None:
    assert power_of_two(count).bit_count() == 1
    assert power_of_two(count) // 2 < count <= power_of_two(count)
