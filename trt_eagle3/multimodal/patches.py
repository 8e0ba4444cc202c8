"""Cut pixels to uint8 patches in merge-block order; `prepared.normalise` converts them to floats.

Images match ``Qwen2VLImageProcessorPil``, which resizes with Pillow. If torchvision is installed,
transformers resizes with torch instead. Single values then differ, by up to 19 of 255 levels on
noise and hard edges. Channels are resized and cut one by one: the values are the same, and a plane
is cut in whole rows of a patch. Large images are resized in parts on all cores
(`resize_channels`). Each part is cut by the thread that resized it.

Decoder processes import this module, so it does not import torch.
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
from trt_eagle3.multimodal.squares import square_patches
from trt_eagle3.multimodal.tiles import Allocate, cut_plane, merge_blocks, tile_patches

__all__ = ["Allocate", "cut_plane", "image_patches", "merge_blocks"]


def image_patches(
    image: Image.Image,
    config: PixelConfig,
    name: str = "image",
    policy: MediaPolicy = LOCAL_MEDIA,
    allocate: Allocate | None = None,
) -> tuple[NDArray[np.uint8], tuple[int, int, int]]:
    """Resize one RGB image and cut it to patches.

    Args:
        policy: also bounds the image after resizing.
        allocate: creates the output array from its shape; None: numpy.
    Returns:
        (pixels uint8 [N, C, 1, patch * patch] in merge-block order, (1, h, w)). With tiles, the
        grid is (tiles, h, w).
    Raises:
        UserError: transformers rejects the size, or the policy excludes it.
    """
    if config.tile_side is not None and config.background is not None:
        return square_patches(image, config, config.tile_side, config.background, allocate)
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
