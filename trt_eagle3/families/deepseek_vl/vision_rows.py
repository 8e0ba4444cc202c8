"""Compute the vision graph's inputs other than the patches from ``grid_thw``.

Shapes: n patches, F images.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["VISION_INPUTS", "image_rows"]

VISION_INPUTS = ("patches", "rope_positions", "frame_starts")


def image_rows(num_images: int, num_patches: int) -> dict[str, Tensor]:
    """Return the inputs by name; see ``vision_graph.py`` for their meaning.

    Args:
        num_patches: patches of an image.
    """
    return {
        "rope_positions": torch.zeros(2, num_images * num_patches, dtype=torch.int32),
        "frame_starts": (torch.arange(num_images + 1) * num_patches).int(),
    }
