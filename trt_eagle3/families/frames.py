"""Frames of patches, as vision graphs take them: where each begins, and how a run is padded.

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
    """``rows [..., n]`` with zeros for the patches added."""
    from torch.nn import functional

    return functional.pad(rows, (0, num_patches - rows.shape[-1]))


def pad_starts(starts: Tensor, total: int) -> Tensor:
    """``starts`` int32 [F + 1], then a frame of what was added, up to ``total``, then empty ones.

    Frames are as many as the next power of two above those given.
    """
    from torch.nn import functional

    num_frames = 1 << (len(starts) - 1).bit_length()
    return functional.pad(starts, (0, num_frames + 1 - len(starts)), value=total)


def patch_ranges(patches_per_token: int, max_tokens: int) -> Mapping[str, SizeRange]:
    """``patches`` and ``frame_bounds`` of an engine for up to ``max_tokens`` visual tokens.

    As many frames as have 16 visual tokens each, and a few more: each may cost a group of packed
    patches. Rounded up to a power of two, as a run's frames are (``pad_starts``).
    """
    block = patches_per_token
    most = max_tokens * block
    usual = max(block, most // 4 // block * block)
    frames = 1 << (most // (16 * block) + 8).bit_length()
    return {"patches": (block, usual, most), "frame_bounds": (2, 2, frames + 1)}
