"""How many rows of which prompts the next prefill takes, and how it lays them out.

A forward pads its batch rows to one width. So that prompts of different lengths waste little, a
prompt's rows may be cut into segments: batch rows over the same pages, each of which sees those
before it, as the op ``TreeAttention`` writes all new rows before any is read.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "chunk_rows",
    "prefill_budget",
    "segment_width",
]

MIN_SEGMENT = 256
"""Rows of a segment at least, where a prompt has several: kernels for fewer read new rows from
their own batch row alone."""

# Costs in rows: reading the weights takes as long as multiplying so many rows by them, and what
# happens once for each forward is worth so many more.
_WEIGHT_ROWS = 256
_FORWARD_ROWS = 64


# Rows of a chunk that are not halved: below, a GPU takes hardly less time for half of them.
_LEAST_BUDGET = 1024


def prefill_budget(chunk: int, num_decoding: int, num_rows: int) -> int:
    """Rows of the next prefill, ``chunk`` at most.

    While ``num_decoding`` sequences decode it is half of them, so that the gap between two of their
    tokens is half as long. Where more than two chunks wait (``num_rows`` of prompts) it is whole
    ones: each is followed by a cycle of those that decode, for which all the others wait.
    """
    if num_decoding == 0 or num_rows > 2 * chunk:
        return chunk
    return min(chunk, max(chunk // 2, _LEAST_BUDGET))


def segment_width(counts: Sequence[int], max_segments: int | None = None) -> int:
    """Rows of each batch row of a forward over ``counts`` rows of several prompts.

    The widest of those with the least padding. ``max_segments`` bounds the batch where prompts are
    cut; 0: none is.
    """
    widest = max(counts)
    if len(counts) == 1 or widest <= MIN_SEGMENT or max_segments == 0:
        return widest
    widths = {-(-n // k) for n in counts for k in range(1, n // MIN_SEGMENT + 1)}
    found = [w for w in widths if max_segments is None or _segments(counts, w) <= max_segments]
    return min(found, key=lambda width: (_padded(counts, width), -width), default=widest)


def chunk_rows(
    remaining: Sequence[int], budget: int, max_segments: int | None = None
) -> dict[int, int]:
    """Rows of the next forward by index of the prompt, of which ``remaining`` rows are left.

    The oldest, index 0, takes part; with their padding they are ``budget`` rows at most. Prompts
    follow in their order, or, where that wastes less, those that are about as short as the oldest.
    """
    if not remaining:
        return {}
    choices = (
        _in_order(remaining, budget, max_segments),
        _alike(remaining, budget, max_segments),
    )
    return max(choices, key=lambda rows: _score(rows, max_segments))


def _in_order(remaining: Sequence[int], budget: int, max_segments: int | None) -> dict[int, int]:
    """As many rows as fit of one prompt after the other."""
    rows: dict[int, int] = {}
    for i, left in enumerate(remaining[: max_segments or budget]):
        room = budget - sum(rows.values())
        while room > 0:
            found = {**rows, i: min(left, room)}
            over = _width_and_rows(found, max_segments)[1] - budget
            if over <= 0:
                rows = found
                break
            room = found[i] - over
        else:
            break
    return rows


def _alike(remaining: Sequence[int], budget: int, max_segments: int | None) -> dict[int, int]:
    """Whole prompts as long as the oldest one or nearly so, while the next one pays."""
    rows = {0: min(remaining[0], budget)}
    for i in sorted(range(1, len(remaining)), key=lambda i: (abs(remaining[i] - remaining[0]), i)):
        found = {**rows, i: remaining[i]}
        fits = len(found) * max(found.values()) <= budget and len(found) <= (max_segments or budget)
        if not fits or _score(found, max_segments) < _score(rows, max_segments):
            break
        rows = found
    return rows


def _score(rows: dict[int, int], max_segments: int | None) -> float:
    """Rows for their cost."""
    padded = _width_and_rows(rows, max_segments)[1]
    return sum(rows.values()) / (max(padded, _WEIGHT_ROWS) + _FORWARD_ROWS)


def _width_and_rows(rows: dict[int, int], max_segments: int | None) -> tuple[int, int]:
    counts = [*rows.values()]
    width = segment_width(counts, max_segments)
    return width, _padded(counts, width)


def _segments(counts: Sequence[int], width: int) -> int:
    return sum(-(-n // width) for n in counts)


def _padded(counts: Sequence[int], width: int) -> int:
    return width * _segments(counts, width)
