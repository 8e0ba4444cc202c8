"""Compute the rope positions of transformers' ``Qwen3VLModel.get_rope_index``."""

# Shapes: P prompt tokens, G grids (one per image or video), F frames (a video has t of them), V
# visual tokens

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rope_index"]


def rope_index(visual_rows: Tensor, grid_thw: Tensor, merge_size: int) -> tuple[Tensor, int]:
    """Return the positions of every prompt token on the axes time, height, width.

    Text advances all axes by one. A frame of h x w patches has one time, spreads over rows and
    columns of merged patches from its start, and advances the position by the longer side. Frames
    of a video are treated like images, because their time is in the text before them.

    Args:
        visual_rows: bool [P]. True at rows of visual embeddings; frames are in prompt order.
        grid_thw: int64 [G, 3]. Patches of each image (t = 1) or video, in prompt order.
        merge_size: patches along a side of a token.
    Returns:
        (position_ids int32 [3, P], rope_delta = max position + 1 - P).
    """
    frames_FHW = torch.repeat_interleave(grid_thw[:, 1:] // merge_size, grid_thw[:, 0], dim=0)
    heights, widths = frames_FHW[:, 0], frames_FHW[:, 1]
    sizes = heights * widths
    places = visual_rows.nonzero().squeeze(1)
    assert places.numel() == int(sizes.sum()), (
        f"{places.numel()} visual rows for frames of {sizes.tolist()} tokens"
    )
    ends = sizes.cumsum(0)
    frame_V = torch.repeat_interleave(torch.arange(sizes.numel()), sizes)
    within_V = torch.arange(places.numel()) - (ends - sizes)[frame_V]
    # How far each token advances the position of later tokens: text by 1, the last token of a frame
    # by its longer side.
    advance_P = (~visual_rows).long()
    advance_P[places[ends - 1]] = torch.maximum(heights, widths)
    positions_3P = (advance_P.cumsum(0) - advance_P).repeat(3, 1)
    positions_3P[1, places] += within_V // widths[frame_V]
    positions_3P[2, places] += within_V % widths[frame_V]
    return positions_3P.int(), int(positions_3P.max()) + 1 - visual_rows.numel()
