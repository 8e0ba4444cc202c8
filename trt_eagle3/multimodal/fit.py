"""The height and width that an image or a video is resized to: transformers' two
``smart_resize`` rules.
"""

from __future__ import annotations

import math

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.pixel_config import PixelConfig

__all__ = ["MAX_ASPECT_RATIO", "fit_image", "fit_video"]

MAX_ASPECT_RATIO = 200
"""transformers refuses longer side / shorter side beyond this."""


def fit_image(name: str, height: int, width: int, config: PixelConfig) -> tuple[int, int]:
    """Height and width after resizing: multiples of ``config.factor``, area within the config's
    bounds.

    Raises:
        UserError: the image is a single pixel, or one side is over 200 times the other.
    """
    if height * width == 1:
        raise UserError(
            f"{name}: expected a picture, got a single pixel (1x1). Give an image of at least 2x2 "
            "pixels."
        )
    return _fit_area(name, height, width, config, config.max_pixels)


def fit_video(
    name: str, num_frames: int, height: int, width: int, config: PixelConfig
) -> tuple[int, int]:
    """Height and width of every frame after resizing: a tile's, or such that the bounds hold for
    each frame, or for frames * height * width.

    Raises:
        UserError: fewer frames than one temporal patch holds, or one side is over 200 times the
            other.
    """
    if config.tile_side is not None:
        return config.tile_side, config.tile_side
    if config.per_frame:
        return _fit_area(name, height, width, config, _most_of_a_frame(num_frames, config))
    if num_frames < config.temporal_patch_size:
        raise UserError(
            f"{name}: expected at least {config.temporal_patch_size} frames, got {num_frames}. "
            "Give more frames, or pass the frame as an image."
        )
    factor, least, most = config.factor, config.min_pixels, config.max_pixels
    if config.max_frame_tokens is not None:
        per_frame = min(config.max_frame_tokens * factor * factor, most // num_frames)
        most = max(per_frame, int(least * 1.05)) * num_frames
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_ratio(name, height, width)
    fit_height, fit_width = round(height / factor) * factor, round(width / factor) * factor
    volume = (
        round(num_frames / config.temporal_patch_size)
        * config.temporal_patch_size
        * fit_height
        * fit_width
    )
    if volume > most:
        return _shrink(height, width, math.sqrt(num_frames * height * width / most), factor)
    if volume < least:
        return _grow(height, width, math.sqrt(least / (num_frames * height * width)), factor)
    return fit_height, fit_width


def _most_of_a_frame(num_frames: int, config: PixelConfig) -> int:
    """transformers' ``Qwen2VLVideoProcessor`` keeps a tenth of a capped video's tokens for text."""
    if config.max_video_tokens is None:
        return config.max_pixels
    whole = int(config.max_video_tokens * config.factor * config.factor * 0.9)
    share = whole * config.temporal_patch_size // num_frames
    return max(min(config.max_pixels, share), int(config.min_pixels * 1.05))


def _fit_area(
    name: str, height: int, width: int, config: PixelConfig, most: int
) -> tuple[int, int]:
    _check_ratio(name, height, width)
    factor, least = config.factor, config.min_pixels
    fit_height, fit_width = round(height / factor) * factor, round(width / factor) * factor
    if fit_height * fit_width > most:
        return _shrink(height, width, math.sqrt(height * width / most), factor)
    if fit_height * fit_width < least:
        return _grow(height, width, math.sqrt(least / (height * width)), factor)
    return fit_height, fit_width


def _check_ratio(name: str, height: int, width: int) -> None:
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise UserError(
            f"{name}: expected an aspect ratio of at most {MAX_ASPECT_RATIO}, got {width}x{height} "
            "pixels. Crop it or cut it into pieces."
        )


def _shrink(height: int, width: int, ratio: float, factor: int) -> tuple[int, int]:
    fit_height = max(factor, math.floor(height / ratio / factor) * factor)
    fit_width = max(factor, math.floor(width / ratio / factor) * factor)
    return fit_height, fit_width


def _grow(height: int, width: int, ratio: float, factor: int) -> tuple[int, int]:
    return math.ceil(height * ratio / factor) * factor, math.ceil(width * ratio / factor) * factor
