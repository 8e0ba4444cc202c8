"""Chunked prefill: choose the prompt rows of the next prefill, and their layout.

A forward pads its batch rows to one width. To reduce padding, a prompt's rows may be split into
segments. Segments are batch rows over the same pages. Each attends to the segments before it,
because the op ``TreeAttention`` writes all new rows before it reads any.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "chunk_rows",
    "prefill_budget",
    "segment_width",
]

MIN_SEGMENT = 256
"""Least rows of a segment, if a prompt has several: kernels for fewer rows read new rows only from
their own batch row."""

# Costs in rows: reading the weights takes as long as the multiplications of this many rows, and
# fixed work per forward as long as this many more.
_WEIGHT_ROWS = 256
_FORWARD_ROWS = 64


# Least rows of a halved chunk: below, a GPU needs nearly the same time for half of the rows.
_LEAST_BUDGET = 1024


def prefill_budget(chunk: int, num_decoding: int, num_rows: int) -> int:
    """Return the row budget of the next prefill, at most ``chunk``.

    While sequences decode, it is half a chunk, but at least ``_LEAST_BUDGET``. This halves the gap
    between two of their tokens. If more than two chunks of prompts wait (``num_rows``), it is a
    whole chunk, because a decoding cycle follows each prefill and delays all waiting prompts.
    """
    if num_decoding == 0 or num_rows > 2 * chunk:
        return chunk
    return min(chunk, max(chunk // 2, _LEAST_BUDGET))


def segment_width(counts: Sequence[int], max_segments: int | None = None) -> int:
    """Return the batch row width of a forward over ``counts`` rows of several prompts.

    It minimises padding; of equal widths the widest wins. ``max_segments``: most batch rows if
    prompts are split; None: any number, 0: prompts are not split.
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
    """Return the rows of each prompt in the next forward, by prompt index.

    ``remaining``: rows left of each prompt. Rows and padding are at most ``budget``. The oldest
    prompt, index 0, always takes part. The others are taken in order or, if that wastes less, by
    similar length.
    """
    if not remaining:
        return {}
    choices = (
        _in_order(remaining, budget, max_segments),
        _alike(remaining, budget, max_segments),
    )
    return max(choices, key=lambda rows: _score(rows, max_segments))


def _in_order(remaining: Sequence[int], budget: int, max_segments: int | None) -> dict[int, int]:
    """Take as many rows as fit, prompt by prompt in order."""
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
    """Take whole prompts of about the oldest one's length, while each one improves the score."""
    rows = {0: min(remaining[0], budget)}
    for i in sorted(range(1, len(remaining)), key=lambda i: (abs(remaining[i] - remaining[0]), i)):
        found = {**rows, i: remaining[i]}
        fits = len(found) * max(found.values()) <= budget and len(found) <= (max_segments or budget)
        if not fits or _score(found, max_segments) < _score(rows, max_segments):
            break
        rows = found
    return rows


def _score(rows: dict[int, int], max_segments: int | None) -> float:
    """Return rows per cost."""
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
