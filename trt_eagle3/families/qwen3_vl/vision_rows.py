"""Compute the vision graph's position inputs from ``grid_thw``.

Shapes: G grids (images and videos), F frames of all grids, n patches of all frames.
Equations: transformers ``modeling_qwen3_vl.py`` (``fast_pos_embed_interpolate``, ``rot_pos_emb``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from trt_eagle3.families.frames import pad_columns, pad_starts

__all__ = ["VisionRows", "merge_order", "padded_rows", "vision_rows"]


@dataclass(frozen=True)
class VisionRows:
    """Inputs of the vision graph other than the patches; see ``vision_graph.py``."""

    pos_embed_rows: Tensor
    pos_embed_weights: Tensor
    rope_positions: Tensor
    frame_starts: Tensor

    def inputs(self) -> dict[str, Tensor]:
        """Return the inputs by name."""
        return dict(vars(self))


def vision_rows(grid_thw: Tensor, merge: int, table_side: int) -> VisionRows:
    """Return the positions of every patch, frame by frame, in merge-block order.

    Args:
        grid_thw: int64 [G, 3]: frames, patch rows and patch columns of each image or video.
        merge: patches joined per side (``spatial_merge_size``).
        table_side: side of the square position table (root of ``num_position_embeddings``).
    """
    frames = [(h, w) for t, h, w in grid_thw.tolist() for _ in range(t)]
    each = [_frame_rows(h, w, merge, table_side) for h, w in frames]
    starts = torch.tensor([0, *(h * w for h, w in frames)]).cumsum(0)
    rows, weights, positions = (torch.cat(parts, dim=1) for parts in zip(*each, strict=True))
    return VisionRows(rows, weights, positions, starts.int())


def padded_rows(inputs: Mapping[str, Tensor], num_patches: int) -> dict[str, Tensor]:
    """Pad ``inputs`` of ``VisionRows`` to ``num_patches`` patches.

    The added patches form a frame, followed by empty frames.
    """
    padded = {n: pad_columns(x, num_patches) for n, x in inputs.items() if n != "frame_starts"}
    return {**padded, "frame_starts": pad_starts(inputs["frame_starts"], num_patches)}


@lru_cache(maxsize=32)
def _frame_rows(h: int, w: int, merge: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the table rows, weights and positions of each packed patch of a frame.

    Cached because frames and images share sizes; the tensors are read-only.

    Returns:
        Table rows i32 [4, h * w], their weights f32 [4, h * w], row and column i32 [2, h * w].
    """
    order = merge_order(h, w, merge)
    corner_rows, corner_weights = _bilinear_corners(h, w, side)
    row_column = torch.stack([torch.arange(h).repeat_interleave(w), torch.arange(w).repeat(h)])
    return corner_rows[:, order].int(), corner_weights[:, order], row_column[:, order].int()


def merge_order(h: int, w: int, merge: int) -> Tensor:
    """Return int64 [h * w]: the row-major index of each packed patch, in merge-block order."""
    index = torch.arange(h * w).view(h // merge, merge, w // merge, merge)
    return index.permute(0, 2, 1, 3).reshape(-1)


def _bilinear_corners(h: int, w: int, side: int) -> tuple[Tensor, Tensor]:
    """Return table rows int64 [4, h * w] and weights f32 [4, h * w] of a bilinear resize.

    The side x side table is stretched over h x w.
    """
    down, right = torch.linspace(0, side - 1, h), torch.linspace(0, side - 1, w)
    top, left = down.int(), right.int()
    bottom, far = (top + 1).clip(max=side - 1), (left + 1).clip(max=side - 1)
    dh, dw = (down - top)[:, None], (right - left)[None]
    rows = [(a[:, None] * side + b[None]).flatten() for a in (top, bottom) for b in (left, far)]
    weights = [(1 - dh) * (1 - dw), (1 - dh) * dw, dh * (1 - dw), dh * dw]
    return torch.stack(rows).long(), torch.stack([x.flatten() for x in weights])
