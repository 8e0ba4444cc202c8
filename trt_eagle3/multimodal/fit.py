"""Compute the size that an image or video is resized to, by transformers' two ``smart_resize``."""

from __future__ import annotations

import math

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.pixel_config import PixelConfig
from trt_eagle3.multimodal.policy import MediaPolicy

__all__ = ["MAX_ASPECT_RATIO", "check_resized", "fit_image", "fit_video"]

# limits after resizing if the policy sets none
_MOST_PIXELS, _MOST_VIDEO_PIXELS = 1 << 28, 1 << 31
_SMALL_PIXELS = 1 << 18  # always allowed after resizing, even under a smaller limit
MAX_ASPECT_RATIO = 200
"""Largest ratio of the longer to the shorter side that transformers accepts."""


def fit_image(name: str, height: int, width: int, config: PixelConfig) -> tuple[int, int]:
    """Return height and width after resizing.

    Both are multiples of ``config.factor``. The area is within the config's bounds.

    Raises:
        UserError: one side is over 200 times the other.
    """
    height, width = config.resized or (height, width)
    return _fit_area(name, height, width, config, config.max_pixels)


def fit_video(
    name: str, num_frames: int, height: int, width: int, config: PixelConfig
) -> tuple[int, int]:
    """Return height and width of every frame after resizing.

    This is a tile's size, or a size within the bounds. The bounds apply to each frame, or to
    frames * height * width.

    Raises:
        UserError: there are fewer frames than one temporal patch holds, or one side is over 200
            times the other.
    """
    if config.tile_side is not None:
        return config.tile_side, config.tile_side
    height, width = config.resized or (height, width)
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


def check_resized(
    name: str, size: tuple[int, int], policy: MediaPolicy, num_frames: int = 1
) -> None:
    """Check the resized image or frames against the policy's limits.

    Args:
        size: height and width after resizing.
    Raises:
        UserError: an image or frame has too many pixels, or all frames have.
    """
    height, width = size
    for count, limit in (
        (1, policy.max_pixels or _MOST_PIXELS),
        (num_frames, policy.max_video_pixels or _MOST_VIDEO_PIXELS),
    ):
        if count * height * width > max(limit, count * _SMALL_PIXELS):
            frames = f"{count} frames of " if count > 1 else ""
            raise UserError(
                f"{name}: {frames}{width}x{height} pixels after resizing, the limit is {limit} in "
                "all. Request fewer pixels, or correct size in the processor files."
            )


def _most_of_a_frame(num_frames: int, config: PixelConfig) -> int:
    """Return the most pixels of a frame.

    As transformers' ``Qwen2VLVideoProcessor``, keep a tenth of a capped video's tokens for text.
    """
    whole = config.max_total_pixels
    if whole is None:
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
