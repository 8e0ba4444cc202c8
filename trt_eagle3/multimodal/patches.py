"""Pixels to uint8 patches in merge-block order; `prepared.normalise` makes transformers' floats of
them.

Images follow ``Qwen2VLImageProcessorPil``: Pillow resizes. (With torchvision installed,
transformers resizes images with torch instead; single values then differ, by up to 19 levels of 255
on noise and hard edges.) Channels are resized and cut one by one: the values are the same, and a
plane is cut in whole rows of a patch. Large images are resized in parts on all cores
(`resize_channels`), and each part is cut where it was made.

No torch here: decoder processes import this module.
"""

# Shapes: N patches, C channels, T frames of a patch, H and W pixels, h and w patches, m patches per
# side of a token

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trt_eagle3.multimodal.fit import fit_image
from trt_eagle3.multimodal.pixel_config import PixelConfig
from trt_eagle3.multimodal.resize import resize_channels

__all__ = ["Allocate", "cut_plane", "image_patches", "merge_blocks"]

Allocate = Callable[[tuple[int, ...]], NDArray[np.uint8]]
"""Makes an array of a shape."""


def image_patches(
    image: Image.Image, config: PixelConfig, name: str = "image", allocate: Allocate | None = None
) -> tuple[NDArray[np.uint8], tuple[int, int, int]]:
    """Resize one RGB image and cut it.

    Args:
        allocate: makes the array of a shape that patches are written to; None: numpy.
    Returns:
        (pixels uint8 [N, C, 1, patch * patch] in merge-block order, (1, h, w)).
    Raises:
        UserError: a size that transformers refuses too, or a single pixel.
    """
    size = fit_image(name, image.height, image.width, config)
    rows, columns = size[0] // config.patch_size, size[1] // config.patch_size
    shape = (rows * columns, 3, 1, config.patch_size**2)
    pixels = np.empty(shape, dtype=np.uint8) if allocate is None else allocate(shape)

    blocks = merge_blocks(pixels, (1, rows, columns), config)
    side = config.patch_size * config.merge_size

    def cut(channel: int, part: NDArray[np.uint8], top: int, left: int) -> None:
        height, width = part.shape
        down = slice(top // side, (top + height) // side)
        across = slice(left // side, (left + width) // side)
        cut_plane(part, blocks[0, down, across, :, :, channel, 0], config)

    resize_channels(image, (size[1], size[0]), Image.Resampling(config.resample), side, cut)
    return pixels, (1, rows, columns)


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
    line = np.dtype((np.void, patch))  # a patch's row moves as one item
    rows, columns, m, _, _ = out.shape
    blocks = plane.view(line).reshape(rows, m, patch, columns, m)
    out.view(line)[...] = blocks.transpose(0, 3, 1, 4, 2)
