"""The vision graph's position inputs, made from ``grid_thw`` alone.

Shapes: G grids (images and videos), F frames of all grids, L patches of the longest frame, n patches of all frames.
Equations: transformers ``modeling_qwen3_vl.py`` (``fast_pos_embed_interpolate``, ``rot_pos_emb``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["VisionRows", "vision_rows"]


@dataclass(frozen=True)
class VisionRows:
    """Inputs of the vision graph besides the patches; see ``graph/vision.py`` for what each means."""

    pos_embed_rows: Tensor
    pos_embed_weights: Tensor
    rope_positions: Tensor
    frame_rows: Tensor
    frame_mask: Tensor
    packed_rows: Tensor

    def inputs(self) -> dict[str, Tensor]:
        """By the graph's input names."""
        return dict(vars(self))


def vision_rows(grid_thw: Tensor, merge: int, table_side: int) -> VisionRows:
    """Positions of every patch, frame by frame, in merge-block order.

    Args:
        grid_thw: int64 [G, 3]: frames, patch rows and patch columns of each image or video.
        merge: patches joined per side (``spatial_merge_size``).
        table_side: side of the square position table (root of ``num_position_embeddings``).
    """
    rows, weights, places, sizes = [], [], [], []
    for t, h, w in grid_thw.tolist():
        order = _merge_order(h, w, merge)
        corner_rows, corner_weights = _bilinear_corners(h, w, table_side)
        row_column = torch.stack([torch.arange(h).repeat_interleave(w), torch.arange(w).repeat(h)])
        for _ in range(t):
            rows.append(corner_rows[:, order])
            weights.append(corner_weights[:, order])
            places.append(row_column[:, order])
            sizes.append(h * w)
    frame_rows, frame_mask, packed_rows = _frames(sizes)
    return VisionRows(
        pos_embed_rows=torch.cat(rows, dim=1).int(),
        pos_embed_weights=torch.cat(weights, dim=1),
        rope_positions=torch.cat(places, dim=1).int(),
        frame_rows=frame_rows,
        frame_mask=frame_mask,
        packed_rows=packed_rows,
    )


def _merge_order(h: int, w: int, merge: int) -> Tensor:
    """int64 [h * w]: row-major patch index of each packed patch; every merge x merge block is contiguous."""
    index = torch.arange(h * w).view(h // merge, merge, w // merge, merge)
    return index.permute(0, 2, 1, 3).reshape(-1)


def _bilinear_corners(h: int, w: int, side: int) -> tuple[Tensor, Tensor]:
    """Table rows int64 [4, h * w] and weights f32 [4, h * w] that stretch the side x side table over h x w."""
    down, right = torch.linspace(0, side - 1, h), torch.linspace(0, side - 1, w)
    top, left = down.int(), right.int()
    bottom, far = (top + 1).clip(max=side - 1), (left + 1).clip(max=side - 1)
    dh, dw = (down - top)[:, None], (right - left)[None]
    rows = [(a[:, None] * side + b[None]).flatten() for a in (top, bottom) for b in (left, far)]
    weights = [(1 - dh) * (1 - dw), (1 - dh) * dw, dh * (1 - dw), dh * dw]
    return torch.stack(rows).long(), torch.stack([x.flatten() for x in weights])


def _frames(sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """frame_rows i32 [F, L], frame_mask bool [F, L], packed_rows i32 [n] for frames of ``sizes`` patches."""
    size = torch.tensor(sizes)
    longest = int(size.max())
    starts = size.cumsum(0) - size
    column = torch.arange(longest)
    mask = column[None] < size[:, None]
    frame_rows = torch.where(mask, starts[:, None] + column[None], starts[:, None])
    return frame_rows.int(), mask, mask.flatten().nonzero().flatten().int()
