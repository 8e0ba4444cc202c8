"""Frames of patches in vision graphs: their first rows, and the padding of a run.

Shapes: n patches, F frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from trt_eagle3.families.family import SizeRange

__all__ = ["pad_columns", "pad_starts", "patch_ranges"]


def pad_columns(rows: Tensor, num_patches: int) -> Tensor:
    """Append zeros to ``rows [..., n]`` for the added patches."""
    from torch.nn import functional

    return functional.pad(rows, (0, num_patches - rows.shape[-1]))


def pad_starts(starts: Tensor, total: int) -> Tensor:
    """Pad ``starts`` int32 [F + 1] with a frame of the added rows up to ``total``, then empty ones.

    The number of frames is the next power of two above the given number.
    """
    from torch.nn import functional

    num_frames = 1 << (len(starts) - 1).bit_length()
    return functional.pad(starts, (0, num_frames + 1 - len(starts)), value=total)


def patch_ranges(patches_per_token: int, max_tokens: int) -> Mapping[str, SizeRange]:
    """Return the ranges of ``patches`` and ``frame_bounds`` for up to ``max_tokens`` visual tokens.

    The maximum number of frames allows 16 visual tokens per frame and a few frames more: each may
    need a group of packed patches. It is rounded up to a power of two, as a run's frames are
    (``pad_starts``).
    """
    block = patches_per_token
    most = max_tokens * block
    usual = max(block, most // 4 // block * block)
    frames = 1 << (most // (16 * block) + 8).bit_length()
    return {"patches": (block, usual, most), "frame_bounds": (2, 2, frames + 1)}
