"""Compute the vision graph's inputs other than the patches from ``grid_thw``.

They include the order by windows and its inverse.

Shapes: G grids (images and videos), F frames of all grids, W windows of all frames, n patches and N
visual tokens of all frames.
Equations: transformers ``vision_utils.py`` (``get_vision_window_index``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from trt_eagle3.families.frames import pad_columns, pad_starts
from trt_eagle3.families.qwen3_vl.vision_rows import merge_order

__all__ = ["VISION_INPUTS", "padded_rows", "window_rows"]

VISION_INPUTS = (
    "patches",
    "window_rows",
    "token_rows",
    "rope_positions",
    "frame_starts",
    "window_starts",
)


def window_rows(grid_thw: Tensor, merge: int, side: int) -> dict[str, Tensor]:
    """Return the inputs by name; see ``vision_graph.py`` for their meaning.

    Args:
        grid_thw: int64 [G, 3]: frames, patch rows and patch columns of each image or video.
        merge: patches joined per side.
        side: tokens along a side of a window.
    """
    frames = [(h, w) for t, h, w in grid_thw.tolist() for _ in range(t)]
    firsts = torch.tensor([0, *(h * w for h, w in frames)]).cumsum(0)
    each = [_frame_rows(h, w, merge, side) for h, w in frames]
    rows = torch.cat([order + first for (order, _, _), first in zip(each, firsts, strict=False)])
    lengths = torch.tensor([0, *(n for _, _, windows in each for n in windows)])
    return {
        "window_rows": rows.int(),
        "token_rows": rows[:: merge**2].div(merge**2, rounding_mode="floor").argsort().int(),
        "rope_positions": torch.cat([positions for _, positions, _ in each], dim=1),
        "frame_starts": firsts.int(),
        "window_starts": lengths.cumsum(0).int(),
    }


def padded_rows(inputs: Mapping[str, Tensor], num_patches: int) -> dict[str, Tensor]:
    """Pad ``inputs`` of ``window_rows`` to ``num_patches`` patches.

    Added patches keep their order, and form a frame and a window of their own.
    """
    patches, tokens = len(inputs["window_rows"]), len(inputs["token_rows"])
    num_tokens = num_patches // (patches // tokens)
    return {
        "window_rows": _stay(inputs["window_rows"], num_patches),
        "token_rows": _stay(inputs["token_rows"], num_tokens),
        "rope_positions": pad_columns(inputs["rope_positions"], num_patches),
        "frame_starts": pad_starts(inputs["frame_starts"], num_patches),
        "window_starts": pad_starts(inputs["window_starts"], num_patches),
    }


def _stay(rows: Tensor, total: int) -> Tensor:
    count = len(rows)
    return functional.pad(rows, (0, total - count)) + functional.pad(
        torch.arange(count, total, dtype=rows.dtype), (count, 0)
    )


@lru_cache(maxsize=32)
def _frame_rows(h: int, w: int, merge: int, side: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Return window-order arrays of a frame, cached because frames and images share sizes.

    Returns:
        The patch at each row in window order, int64 [h * w]; its row and column, int32 [2, h * w];
        the number of patches of each window. The tensors are read-only.
    """
    down, across = h // merge, w // merge
    columns = -(-across // side)
    window = (torch.arange(down) // side)[:, None] * columns + torch.arange(across) // side
    tokens = window.flatten().argsort(stable=True)
    order = (tokens[:, None] * merge**2 + torch.arange(merge**2)).flatten()
    place = merge_order(h, w, merge)[order]
    sizes = tuple((window.flatten().bincount() * merge**2).tolist())
    return order, torch.stack([place // w, place % w]).int(), sizes
