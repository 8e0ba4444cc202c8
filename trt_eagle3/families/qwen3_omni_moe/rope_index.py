"""Compute the rope positions of Qwen3-Omni's ``get_rope_index`` without audio."""

# Shapes: P prompt tokens, G grids (one per image or video)

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["rope_index"]


def rope_index(
    visual_rows: Tensor, grid_thw: Tensor, patch_positions: Tensor, merge_size: int
) -> tuple[Tensor, int]:
    """Return the positions of every prompt token on the axes time, height, width.

    Text advances all axes by one. An image or video of t x h x w patches spreads over time, rows
    and columns from its start. The next token has the largest of these positions plus one.

    Args:
        visual_rows: bool [P]. True at rows of visual embeddings, in prompt order.
        grid_thw: int64 [G, 3]. Patches of each image (t = 1) or video, in prompt order.
        patch_positions: int64 [G]. Time positions between temporal patches.
        merge_size: patches along a side of a token.
    Returns:
        (position_ids int32 [3, P], rope_delta = max position + 1 - P).
    """
    merged = [(t, h // merge_size, w // merge_size) for t, h, w in grid_thw.tolist()]
    steps = patch_positions.tolist()
    places = visual_rows.nonzero().squeeze(1)
    ends = torch.tensor([0, *(t * h * w for t, h, w in merged)]).cumsum(0).tolist()
    assert places.numel() == ends[-1], f"{places.numel()} visual rows for grids of {ends[-1]}"
    advance_P = (~visual_rows).long()
    for (t, h, w), step, end in zip(merged, steps, ends[1:], strict=True):
        advance_P[places[end - 1]] = max(h, w, (t - 1) * step + 1)
    positions_3P = (advance_P.cumsum(0) - advance_P).repeat(3, 1)
    for (t, h, w), step, (start, end) in zip(merged, steps, pairwise(ends), strict=True):
        rows, within = places[start:end], torch.arange(t * h * w)
        positions_3P[0, rows] += within // (h * w) * step
        positions_3P[1, rows] += within // w % h
        positions_3P[2, rows] += within % w
    return positions_3P.int(), int(positions_3P.max()) + 1 - visual_rows.numel()
