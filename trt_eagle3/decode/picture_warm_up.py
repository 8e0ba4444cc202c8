"""Pictures of every padded size, before the first request."""

from __future__ import annotations

import logging
from math import isqrt

import torch

from trt_eagle3.decode.forward.runner import PatchBuckets
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.warm_up import has_room_for_graphs
from trt_eagle3.engine.buckets import CAPTURED_AT_RUN
from trt_eagle3.engine.memory import request_memory
from trt_eagle3.errors import DeviceMemoryError
from trt_eagle3.families.registry import tower_of

__all__ = ["picture_grid", "run_pictures"]

_log = logging.getLogger("trt_eagle3")


def run_pictures(bundle: LoadedBundle) -> int:
    """Run the vision tower over a picture of every size to which patches are padded, as often as
    captures its graph: otherwise the third picture of a size would keep everybody waiting. Where
    shapes depend on more than that (windows), others are captured as they come.

    Returns:
        How many sizes have run; 0 where the target reads text only.
    """
    buckets = bundle.patch_buckets
    if buckets is None:
        return 0
    return sum(has_room_for_graphs() and _run(bundle, buckets, n) for n in buckets.sizes)


def _run(bundle: LoadedBundle, buckets: PatchBuckets, size: int) -> bool:
    """A picture that is padded to ``size`` patches; whether memory held it."""
    vision = bundle.spec.require_vision()
    grid = picture_grid(buckets, size, vision.spatial_merge_size)
    patches = torch.zeros(
        grid[0] * grid[1] * grid[2], vision.patch_dim, dtype=bundle.dtype, device=bundle.device
    )
    rows = tower_of(bundle.spec).inputs(vision, torch.tensor([grid]))
    try:
        with request_memory(f"a picture of {size} patches", "Lower limits.max_visual_tokens."):
            for _ in range(CAPTURED_AT_RUN):
                bundle.vision.forward(patches, rows)
    except DeviceMemoryError as error:
        _log.warning("%s", error)
        return False
    return True


def picture_grid(buckets: PatchBuckets, size: int, merge: int) -> tuple[int, int, int]:
    """Frames, patch rows and patch columns of a picture whose patches are padded to ``size``, one
    of ``buckets.sizes``: tiles of as many patches as belong together, or, where those are the
    ``merge`` x ``merge`` of a token, as nearly a square as may be.
    """
    if buckets.unit > merge**2:
        side = isqrt(buckets.unit)
        return size // buckets.unit, side, side
    tokens = size // merge**2
    heights = range(isqrt(tokens), 0, -1)  # of height 1 a picture has all of them
    rows = next(n for n in heights if buckets.size_of(n * (tokens // n) * merge**2) == size)
    return 1, rows * merge, tokens // rows * merge
