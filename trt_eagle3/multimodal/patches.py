"""Pixels to uint8 patches in merge-block order; `prepared.normalise` makes transformers' floats of
them.

Images follow ``Qwen2VLImageProcessorPil``: Pillow resizes. (With torchvision installed,
transformers resizes images with torch instead; single values then differ, by up to 19 levels of 255
on noise and hard edges.) Channels are resized and cut one by one: the values are the same, a plane
is cut in whole rows of a patch, and three threads share the work.

No torch here: decoder processes import this module.
"""

# Shapes: N patches, C channels, T frames of a patch, H and W pixels, h and w patches, m patches per
# side of a token

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trt_eagle3.multimodal.fit import fit_image
from trt_eagle3.multimodal.pixel_config import PixelConfig

__all__ = ["Allocate", "cut_plane", "image_patches"]

_LARGE = 1 << 20  # pixels from which threads pay

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

    def prepare(channel: int) -> None:
        plane = image.getchannel(channel).resize(
            size[::-1], resample=Image.Resampling(config.resample)
        )
        cut_plane(np.asarray(plane), pixels[:, channel, 0], config)

    if max(image.height * image.width, size[0] * size[1]) < _LARGE:
        for channel in range(3):
            prepare(channel)
    else:
        # Pillow and numpy let each other run
        with ThreadPoolExecutor(3, "trt-eagle3-channel") as pool:
            list(pool.map(prepare, range(3)))
    return pixels, (1, rows, columns)


def cut_plane(plane: NDArray[np.uint8], out: NDArray[np.uint8], config: PixelConfig) -> None:
    """Cut ``plane [H, W]``, one channel of a frame, into ``out [h * w, patch * patch]`` in
    merge-block order.
    """
    patch, m = config.patch_size, config.merge_size
    rows, columns = plane.shape[0] // patch // m, plane.shape[1] // patch // m
    line = np.dtype((np.void, patch))  # a patch's row moves as one item
    blocks = plane.view(line).reshape(rows, m, patch, columns, m)
    out.view(line).reshape(rows, columns, m, m, patch)[...] = blocks.transpose(0, 3, 1, 4, 2)
