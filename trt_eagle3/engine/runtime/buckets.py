"""The sizes to which forwards are padded, so that captured CUDA graphs and kernels fit again.

One table for target, draft and vision tower. The numbers were measured on one H200
(docs/measurements.md).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

__all__ = [
    "BATCHES",
    "BATCH_SIZES",
    "CAPTURED_AT_RUN",
    "MAX_WHOLE_WIDTH",
    "PATCHES",
    "PICKED_ROWS",
    "PROMPTS",
    "PROMPT_WIDTHS",
    "ROWS",
    "Buckets",
    "batch_sizes",
    "padded_size",
    "power_of_two",
    "warm_widths",
]

_ANY = sys.maxsize


@dataclass(frozen=True)
class Buckets:
    """Sizes to which a count is padded: multiples of a step that grows with the count.

    Attributes:
        steps: pairs (limit, step), ascending. A count up to ``limit`` is padded to a multiple of
            ``step``. A count above the last limit is not padded.
    """

    steps: tuple[tuple[int, int], ...]

    @property
    def limit(self) -> int:
        """The largest count that is padded."""
        return self.steps[-1][0]

    def size_of(self, count: int) -> int:
        """The size that ``count`` is padded to."""
        step = next((step for limit, step in self.steps if count <= limit), 1)
        return -(-count // step) * step

    def sizes(self, most: int) -> list[int]:
        """All sizes that counts from 1 to ``most`` are padded to, ascending."""
        return sorted({self.size_of(count) for count in range(1, most + 1)})


CAPTURED_AT_RUN = 3
"""The run of the same shapes that captures them: prompts seldom repeat theirs, decode steps do."""
MAX_WHOLE_WIDTH = 256
"""Rows of one sequence at most in a forward that is captured whole: up to there a GPU takes about
as long as it takes to read the weights.
"""

BATCHES = Buckets(((4, 1), (8, 2), (32, 4), (64, 8), (128, 16), (_ANY, 32)))
"""Sequences of a step: at most a quarter of a batch is padding from four sequences on."""
BATCH_SIZES = tuple(BATCHES.sizes(128))
"""Sizes of steps that are captured before the first request."""

PROMPTS = Buckets(((64, 32), (_ANY, 64)))
"""Rows of a prompt that runs alone. Long prompts are padded by no more than what a tile of the
matrix products holds anyway.
"""
PROMPT_WIDTHS = tuple(PROMPTS.sizes(MAX_WHOLE_WIDTH))
"""Widths of prompts that run alone and are captured whole."""

ROWS = Buckets(((256, 32), (1024, 64), (4096, 128)))
"""Rows of a forward that is captured in pieces, those of all its sequences together. For more rows
a device takes much longer than the host needs to launch them one by one.
"""

PICKED_ROWS = Buckets(tuple((1 << i, 1 << i) for i in range(8)))
"""Rows of prompts that are read after the last attention, one or more of each sequence: powers of
two, up to the sequences of the largest batch whose graphs are captured.
"""

PATCHES = Buckets(((1024, 64), (2048, 128)))
"""Patches of a run of the vision tower: up to an eighth more from 512 on. Launches of larger runs
are hidden behind their work, so those are not captured.
"""

_MAX_NEAR = 1024  # up to here every width of a prompt is run ahead
_FAR_STEP = 256  # beyond, which kernels are chosen changes less


def padded_size(batch_size: int, most: int) -> int:
    """The size that a batch of ``batch_size`` is padded to, ``most`` at most: an engine may be
    built for no larger ones.
    """
    return min(BATCHES.size_of(batch_size), most)


def batch_sizes(max_batch_size: int) -> list[int]:
    """All sizes that batches of up to ``max_batch_size`` are padded to, ascending."""
    return sorted({padded_size(n, max_batch_size) for n in range(1, max_batch_size + 1)})


def power_of_two(count: int) -> int:
    """The next power of two that is not less than ``count``."""
    return 1 << (count - 1).bit_length()


def warm_widths(room: int) -> list[int]:
    """Widths of prompts that run before the first request, the largest first, ``room`` rows at
    most.
    """
    far = range(_FAR_STEP, room + 1, _FAR_STEP)
    near = PROMPTS.sizes(min(room, _MAX_NEAR))
    return sorted({room, *far, *(width for width in near if width <= room)} - {0}, reverse=True)
