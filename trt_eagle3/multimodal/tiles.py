"""Cut planes of pixels into patches in merge-block order, and images into equal tiles.

Tiles match ``GotOcr2ImageProcessorPil``, which transformers' InternVL uses. The image is stretched
over the grid of tiles with the nearest aspect ratio. A thumbnail of the whole image comes last.

Decoder processes import this module, so it does not import torch.
"""

# Shapes: N patches, C channels, T frames of a patch, H and W pixels, h and w patches, m patches per
# side of a token

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trt_eagle3.multimodal.pixel_config import PixelConfig
from trt_eagle3.multimodal.resize import resize_channels

__all__ = ["Allocate", "cut_plane", "merge_blocks", "tile_grid", "tile_patches"]

Allocate = Callable[[tuple[int, ...]], NDArray[np.uint8]]
"""Create an array from its shape."""


def tile_patches(
    image: Image.Image, config: PixelConfig, side: int, allocate: Allocate | None = None
) -> tuple[NDArray[np.uint8], tuple[int, int, int]]:
    """Resize one RGB image and cut it into tiles of ``side`` pixels, row by row.

    If there is more than one tile, a thumbnail is appended.

    Returns:
        (pixels uint8 [N, C, 1, patch * patch], each tile in merge-block order, (tiles, h, w)).
    """
    columns, rows = tile_grid(image.height, image.width, config)
    count, patches = columns * rows, side // config.patch_size
    grid = (count + (count > 1), patches, patches)
    shape = (grid[0] * patches**2, 3, 1, config.patch_size**2)
    pixels = np.empty(shape, dtype=np.uint8) if allocate is None else allocate(shape)
    blocks = merge_blocks(pixels, grid, config)

    def cut(channel: int, part: NDArray[np.uint8], top: int, left: int) -> None:
        for down in range(0, part.shape[0], side):
            for right in range(0, part.shape[1], side):
                tile = (top + down) // side * columns + (left + right) // side
                plane = part[down : down + side, right : right + side]
                cut_plane(plane, blocks[tile, :, :, :, :, channel, 0], config)

    def cut_last(channel: int, part: NDArray[np.uint8], _top: int, _left: int) -> None:
        cut_plane(part, blocks[count, :, :, :, :, channel, 0], config)

    resample = Image.Resampling(config.resample)
    resize_channels(image, (columns * side, rows * side), resample, side, cut)
    if count > 1:
        resize_channels(image, (side, side), resample, side, cut_last)
    return pixels, grid


def tile_grid(height: int, width: int, config: PixelConfig) -> tuple[int, int]:
    """Return the columns and rows of tiles whose ratio is nearest the image's.

    Of equally near grids, choose the largest that the image covers at least half, else the
    smallest.
    """
    assert config.tile_side is not None, "no tiles"
    if config.max_tiles < 2:
        return 1, 1
    ratio, area = width / height, width * height
    nearest, found = float("inf"), (1, 1)
    for columns, rows in _arrangements(config.min_tiles, config.max_tiles):
        distance = abs(ratio - columns / rows)
        covers = area > 0.5 * config.tile_side**2 * columns * rows
        if distance < nearest or (distance == nearest and covers):
            nearest, found = distance, (columns, rows)
    return found


@lru_cache(maxsize=16)
def _arrangements(least: int, most: int) -> list[tuple[int, int]]:
    """List all grids (columns, rows) within the bounds, by tile count, then by columns."""
    grids = [
        (c, count // c)
        for count in range(1, most + 1)
        for c in range(1, count + 1)
        if count % c == 0
    ]
    return [grid for grid in grids if grid[0] * grid[1] >= least]


def merge_blocks(
    pixels: NDArray[np.uint8], grid: tuple[int, int, int], config: PixelConfig
) -> NDArray[np.uint8]:
    """View ``pixels [N, C, T, patch * patch]`` of (t, h, w) patches by merge blocks.

    Returns:
        [t, h / m, w / m, m, m, C, T, patch * patch].
    """
    m = config.merge_size
    t, h, w = grid
    return pixels.reshape(t, h // m, w // m, m, m, *pixels.shape[1:])


def cut_plane(plane: NDArray[np.uint8], out: NDArray[np.uint8], config: PixelConfig) -> None:
    """Cut ``plane [H, W]``, one channel of a frame or a part of it, into merge-block order.

    Args:
        plane: contiguous in its rows; whole merge blocks.
        out: [h / m, w / m, m, m, patch * patch], a part of `merge_blocks`.
    """
    patch = config.patch_size
    line = np.dtype((np.void, patch))  # copies a row of a patch as one item
    rows, columns, m, _, _ = out.shape
    blocks = plane.view(line).reshape(rows, m, patch, columns, m)
    out.view(line)[...] = blocks.transpose(0, 3, 1, 4, 2)
