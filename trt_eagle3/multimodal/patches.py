"""Pixels to flattened patches, equal to transformers element for element.

Images follow ``Qwen2VLImageProcessorPil``: Pillow resizes, numpy normalises. (With torchvision installed, transformers
resizes images with torch instead; single values then differ, by up to 19 levels of 255 on noise and hard edges.)
Videos follow ``Qwen3VLVideoProcessor``, which exists for torchvision only: its resize of uint8 frames on the CPU is
``torch.nn.functional.interpolate`` with antialias, and that is what runs here.
"""

# Shapes: N patches, D = channels * temporal_patch * patch * patch, F frames, C channels

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.fit import fit_image, fit_video
from trt_eagle3.multimodal.pixel_config import PixelConfig

__all__ = ["image_patches", "video_patches"]

_TORCH_FILTERS = {2: "bilinear", 3: "bicubic"}


def image_patches(image: Image.Image, config: PixelConfig, name: str = "image") -> tuple[Tensor, tuple[int, int, int]]:
    """One RGB image to patches.

    Returns:
        (patches float32 [N, D] in merge-block order with the still repeated over the temporal patch, (1, h, w)).
    Raises:
        UserError: a size that transformers refuses too, or a single pixel.
    """
    height, width = fit_image(name, image.height, image.width, config)
    resized = image.resize((width, height), resample=Image.Resampling(config.resample))
    pixels: NDArray[np.float32] = (np.asarray(resized).astype(np.float64) * config.rescale_factor).astype(np.float32)
    mean, std = np.array(config.mean, dtype=np.float32), np.array(config.std, dtype=np.float32)
    frame = torch.from_numpy((pixels - mean) / std).permute(2, 0, 1)[None]
    return _patchify(frame.expand(config.temporal_patch_size, -1, -1, -1), config)


def video_patches(frames: Tensor, config: PixelConfig, name: str = "video") -> tuple[Tensor, tuple[int, int, int]]:
    """Frames to patches; the last frame is repeated until the count fills whole temporal patches.

    Args:
        frames: uint8 [F, H, W, 3].
    Returns:
        (patches float32 [N, D], (t, h, w)).
    Raises:
        UserError: too few frames, an extreme aspect ratio, or a filter that torch does not have.
    """
    num_frames, old_height, old_width, _ = frames.shape
    height, width = fit_video(name, num_frames, old_height, old_width, config)
    pixels = frames.permute(0, 3, 1, 2).contiguous()
    if (height, width) != (old_height, old_width):
        mode = _TORCH_FILTERS.get(config.resample)
        if mode is None:
            raise UserError(
                f"{name}: resample: expected 2 or 3, got {config.resample}. Mend the video processor config."
            )
        pixels = torch.nn.functional.interpolate(
            pixels, size=(height, width), mode=mode, align_corners=False, antialias=True
        )
    # transformers folds the rescaling into mean and std; folding is part of the exact values.
    mean = (torch.tensor(config.mean) * (1.0 / config.rescale_factor)).view(-1, 1, 1)
    std = (torch.tensor(config.std) * (1.0 / config.rescale_factor)).view(-1, 1, 1)
    values = pixels.to(torch.float32).sub_(mean).div_(std)
    if missing := -num_frames % config.temporal_patch_size:
        values = torch.cat((values, values[-1:].expand(missing, -1, -1, -1)))
    return _patchify(values, config)


def _patchify(frames: Tensor, config: PixelConfig) -> tuple[Tensor, tuple[int, int, int]]:
    """float32 [F, C, H, W] -> ([N, D], (t, h, w)); the 2x2 patches of one token lie together."""
    num_frames, channels, height, width = frames.shape
    patch, merge, temporal = config.patch_size, config.merge_size, config.temporal_patch_size
    t, h, w = num_frames // temporal, height // patch, width // patch
    blocks = frames.reshape(t, temporal, channels, h // merge, merge, patch, w // merge, merge, patch)
    patches = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, channels * temporal * patch * patch)
    return patches.contiguous(), (t, h, w)
