"""Padded sizes of forwards, so that captured CUDA graphs and kernels can be reused.

Target, draft and vision tower share these tables. The numbers were measured on one H200
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
    "PROMPT_LOGIT_ROWS",
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
    """Padded sizes of a count: multiples of a step that grows with the count.

    Attributes:
        steps: pairs (limit, step), ascending. A count up to ``limit`` is padded to a multiple of
            ``step``. A count above the last limit is not padded.
    """

    steps: tuple[tuple[int, int], ...]

    @property
    def limit(self) -> int:
        """Return the largest count that is padded."""
        return self.steps[-1][0]

    def size_of(self, count: int) -> int:
        """Return the size that ``count`` is padded to."""
        step = next((step for limit, step in self.steps if count <= limit), 1)
        return -(-count // step) * step

    def sizes(self, most: int) -> list[int]:
        """Return all sizes that counts from 1 to ``most`` are padded to, ascending."""
        return sorted({self.size_of(count) for count in range(1, most + 1)})


CAPTURED_AT_RUN = 3
"""Capture a set of shapes at this run. Prompts seldom repeat their shapes; decode steps do."""
PROMPT_LOGIT_ROWS = 64
"""Most rows of a prompt chunk that return logits; each costs a row of the vocabulary."""
MAX_WHOLE_WIDTH = 256
"""Most rows of one sequence in a forward that is captured whole. Up to this width, a GPU takes
about as long as reading the weights takes.
"""

BATCHES = Buckets(((4, 1), (8, 2), (32, 4), (64, 8), (128, 16), (_ANY, 32)))
"""Sequences of a step. From four sequences on, at most a quarter of a batch is padding."""
BATCH_SIZES = tuple(BATCHES.sizes(128))
"""Batch sizes of steps that are captured before the first request."""

PROMPTS = Buckets(((64, 32), (_ANY, 64)))
"""Rows of a prompt that runs alone. The padding of a long prompt stays within one tile of the
matrix products.
"""
PROMPT_WIDTHS = tuple(PROMPTS.sizes(MAX_WHOLE_WIDTH))
"""Widths of prompts that run alone and are captured whole."""

ROWS = Buckets(((256, 32), (1024, 64), (4096, 128)))
"""Rows of a forward that is captured in pieces, summed over its sequences. For more rows, the
device takes much longer than the host needs to launch each node.
"""

PICKED_ROWS = Buckets(tuple((1 << i, 1 << i) for i in range(8)))
"""Prompt rows that are read after the last attention, at least one for each sequence. The sizes are
powers of two, up to the sequences of the largest captured batch.
"""

PATCHES = Buckets(((1024, 64), (2048, 128)))
"""Patches of a run of the vision tower. From 512 on, the padding is at most an eighth. Larger runs
are not captured: the device's work hides their launches.
"""

_MAX_NEAR = 1024  # every prompt width up to here is run during warm-up
_FAR_STEP = 256  # above it, the choice of kernels changes less with the width


def padded_size(batch_size: int, most: int) -> int:
    """Return the size that a batch of ``batch_size`` is padded to, at most ``most``: an engine may
    be built for no larger batch.
    """
    return min(BATCHES.size_of(batch_size), most)


def batch_sizes(max_batch_size: int) -> list[int]:
    """Return all sizes that batches of up to ``max_batch_size`` are padded to, ascending."""
    return sorted({padded_size(n, max_batch_size) for n in range(1, max_batch_size + 1)})


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is not less than ``count``."""
    return 1 << (count - 1).bit_length()


def warm_widths(room: int) -> list[int]:
    """Return the widths of prompts that run before the first request, at most ``room`` rows, in
    descending order.
    """
    far = range(_FAR_STEP, room + 1, _FAR_STEP)
    near = PROMPTS.sizes(min(room, _MAX_NEAR))
    return sorted({room, *far, *(width for width in near if width <= room)} - {0}, reverse=True)
