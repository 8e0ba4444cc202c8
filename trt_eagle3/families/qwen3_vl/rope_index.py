"""Three-axis rope positions of a prompt: what transformers' ``Qwen3VLModel.get_rope_index``
computes.
"""

# Shapes: P prompt tokens, G grids (one per image or video), F frames (a video has t of them), V
# visual tokens

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rope_index"]


def rope_index(visual_rows: Tensor, grid_thw: Tensor, merge_size: int) -> tuple[Tensor, int]:
    """Positions of every prompt token on the axes time, height, width.

    Text advances all axes by one. A frame of h x w patches stands at one time, spreads over rows
    and columns of merged patches from there, and advances the position by the longer side. Frames
    of a video are frames like any other: their time is written in the text before them.

    Args:
        visual_rows: bool [P]. True where a visual embedding goes; frames follow each other in
            prompt order.
        grid_thw: int64 [G, 3]. Patches of each image (t = 1) or video, in prompt order.
        merge_size: patches along one side of one token.
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
    # How far each token moves the position for those after it: text 1, the last token of a frame
    # its longer side.
    advance_P = (~visual_rows).long()
    advance_P[places[ends - 1]] = torch.maximum(heights, widths)
    positions_3P = (advance_P.cumsum(0) - advance_P).repeat(3, 1)
    positions_3P[1, places] += within_V // widths[frame_V]
    positions_3P[2, places] += within_V % widths[frame_V]
    return positions_3P.int(), int(positions_3P.max()) + 1 - visual_rows.numel()
