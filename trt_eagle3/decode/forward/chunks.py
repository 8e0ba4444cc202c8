"""Chunked prefill: choose the prompt rows of the next prefill, and their layout.

A forward pads its batch rows to one width. To reduce padding, a prompt's rows may be split into
segments. Segments are batch rows over the same pages. Each attends to the segments before it,
because the op ``TreeAttention`` writes all new rows before it reads any.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "MAX_STEP_MS",
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


MAX_STEP_MS = 100.0
"""Target for the time between two tokens of a sequence while prompts are prefilled.

By simulation of 128 clients with the costs of an 8B target on an H200 (``test_max_step.py``): the
same throughput as whole chunks of 4,096 rows, and first tokens as early. Half of it costs nothing
there either; a quarter costs 4 % of the throughput, and first tokens wait.
"""


def prefill_budget(chunk: int, num_in_time: int | None) -> int:
    """Return the row budget of the next prefill, at most ``chunk``.

    ``num_in_time``: rows that fit into a step's target time beside the sequences that decode; None:
    no sequence decodes, or the costs are not known. Fewer rows than reading the weights takes gain
    no time, so they are the least.
    """
    return chunk if num_in_time is None else min(chunk, max(num_in_time, _WEIGHT_ROWS))


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
