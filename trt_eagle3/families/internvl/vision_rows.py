"""Compute the vision graph's inputs other than the patches from ``grid_thw``.

Inside the tower, a tile's rows are its class token and its patches row by row, as in transformers.
Outside, patches are in merge-block order, so that joining the patches of a token
(``pixel_shuffle``) copies nothing.

Shapes: n patches and R rows of all tiles, F tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from trt_eagle3.families.qwen3_vl.vision_rows import merge_order

__all__ = ["VISION_INPUTS", "padded_rows", "tile_rows"]

VISION_INPUTS = (
    "patches",
    "row_sources",
    "position_rows",
    "patch_rows",
    "rope_positions",
    "frame_starts",
)


def tile_rows(num_tiles: int, side: int, merge: int) -> dict[str, Tensor]:
    """Return the inputs by name; see ``vision_graph.py`` for their meaning.

    Args:
        side: patches along a side of a tile.
        merge: patches joined per side.
    """
    sources, places = _one_tile(side, merge)
    patches, rows = side**2, side**2 + 1
    tile = torch.arange(num_tiles)[:, None]
    shifted = torch.where(sources > 0, sources + tile * patches, 0)
    return {
        "row_sources": shifted.flatten().int(),
        "position_rows": torch.arange(rows).repeat(num_tiles).int(),
        "patch_rows": (places + tile * rows).flatten().int(),
        "rope_positions": torch.zeros(2, num_tiles * rows, dtype=torch.int32),
        "frame_starts": (torch.arange(num_tiles + 1) * rows).int(),
    }


def padded_rows(
    inputs: Mapping[str, Tensor], num_patches: int, side: int, merge: int
) -> dict[str, Tensor]:
    """Pad ``inputs`` of ``tile_rows`` to ``num_patches`` patches, by whole tiles."""
    if len(inputs["patch_rows"]) == num_patches:
        return dict(inputs)
    return tile_rows(num_patches // side**2, side, merge)


@lru_cache(maxsize=4)
def _one_tile(side: int, merge: int) -> tuple[Tensor, Tensor]:
    """Return the source of each row of a tile, and the row of each patch.

    Sources int64 [side**2 + 1]: 0 the class token, else 1 + the patch. Rows int64 [side**2].
    """
    places = merge_order(side, side, merge) + 1
    sources = torch.zeros(side**2 + 1, dtype=torch.int64)
    sources[places] = torch.arange(1, side**2 + 1)
    return sources, places
