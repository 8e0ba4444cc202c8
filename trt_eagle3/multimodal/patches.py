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

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trt_eagle3.multimodal.fit import check_resized, fit_image
from trt_eagle3.multimodal.pixel_config import PixelConfig
from trt_eagle3.multimodal.policy import LOCAL_MEDIA, MediaPolicy
from trt_eagle3.multimodal.resize import resize_channels
from trt_eagle3.multimodal.tiles import Allocate, cut_plane, merge_blocks, tile_patches

__all__ = ["Allocate", "cut_plane", "image_patches", "merge_blocks"]


def image_patches(
    image: Image.Image,
    config: PixelConfig,
    name: str = "image",
    policy: MediaPolicy = LOCAL_MEDIA,
    allocate: Allocate | None = None,
) -> tuple[NDArray[np.uint8], tuple[int, int, int]]:
    """Resize one RGB image and cut it.

    Args:
        policy: bounds the image after it was resized, too.
        allocate: makes the array of a shape that patches are written to; None: numpy.
    Returns:
        (pixels uint8 [N, C, 1, patch * patch] in merge-block order, (1, h, w); of tiles t of them).
    Raises:
        UserError: a size that transformers refuses too, or one that the policy excludes.
    """
    if config.tile_side is not None:
        return tile_patches(image, config, config.tile_side, allocate)
    size = fit_image(name, image.height, image.width, config)
    check_resized(name, size, policy)
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
