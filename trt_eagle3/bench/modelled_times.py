"""What an H200 takes for forwards of an 8B in bfloat16, as it was measured: a device for the
benchmarks and tests that ask what the host and the scheduler make of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

__all__ = [
    "H200_DEPTHS",
    "cycle_ms",
    "draft_prompt_ms",
    "interpolated",
    "mixed_ms",
    "prompt_ms",
    "short_cycle_ms",
]

# Milliseconds of a cycle by batch size, with chains of 0 to 3 tokens and 1,024 tokens of context
# (``bench.width``, 2026-11-22; 5 is extrapolated). At 8 a chain of 2 costs what a chain of 1 does.
_CYCLES: Mapping[int, Mapping[int, float]] = {
    0: {1: 4.12, 8: 4.61, 32: 5.95, 64: 7.25, 128: 10.20},
    1: {1: 4.72, 8: 5.82, 32: 7.15, 64: 9.39, 128: 13.75},
    2: {1: 4.82, 8: 5.80, 32: 7.32, 64: 10.00, 128: 16.32},
    3: {1: 5.07, 8: 6.10, 32: 7.76, 64: 11.24, 128: 19.34},
    5: {1: 5.60, 8: 7.00, 32: 9.50, 64: 15.00, 128: 27.00},
}
H200_DEPTHS = tuple(_CYCLES)
"""Of chains."""
# A prompt of 1,024 tokens takes 24 to 25 ms (``bench.prefill``, 2026-11-22), a short one as long as
# reading the weights.
_LAUNCHES_MS, _WEIGHTS_MS, _ROW_MS = 1.2, 4.1, 0.023
# 1,024 tokens of 147,456 bytes each, at 4.28 TB/s.
_CONTEXT_MS = 0.035
_DRAFT_SHARE = 0.05  # of the target's time, over the same rows: one layer of 36, and a wider input


def cycle_ms(batch: int, depth: int) -> float:
    """Of ``batch`` sequences that draft a chain of ``depth``, one of ``H200_DEPTHS`` or the next
    one down; the draft's forwards included.
    """
    known = max(d for d in H200_DEPTHS if d <= depth)
    return interpolated(_CYCLES[known], batch)


def prompt_ms(num_rows: int) -> float:
    """Of a prefill of ``num_rows``, without the draft."""
    return _LAUNCHES_MS + max(_WEIGHTS_MS, _ROW_MS * num_rows)


def short_cycle_ms(batch: int, depth: int) -> float:
    """The same without what attention reads of the past."""
    return cycle_ms(batch, depth) - batch * _CONTEXT_MS


def mixed_ms(num_rows: int, batch: int) -> float:
    """Of a prefill of ``num_rows`` in one forward with a plain step of ``batch`` sequences, whose
    weights it reads once. Reckoned: of a step is left what more than one sequence adds.
    """
    return prompt_ms(num_rows + batch) + cycle_ms(batch, 0) - cycle_ms(1, 0)


def draft_prompt_ms(num_rows: int) -> float:
    """Of the draft over ``num_rows`` of prompts, or of what it catches up with."""
    return _DRAFT_SHARE * prompt_ms(num_rows)


def interpolated(points: Mapping[int, float], x: int) -> float:
    """Linear between ``points`` and in proportion beyond the last one; the first counts below."""
    known = sorted(points.items())
    if x <= known[0][0]:
        return known[0][1]
    for (x0, y0), (x1, y1) in pairwise(known):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return known[-1][1] * x / known[-1][0]
