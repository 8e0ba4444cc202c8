"""MediaOptions: the size and frame times that a message requests for one image or video.

Names are those of qwen-vl-utils. Pixels bound an image, or each frame of a video.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trt_eagle3.errors import UserError, quote
from trt_eagle3.multimodal.pixel_config import PixelConfig

__all__ = ["NO_MEDIA_OPTIONS", "PIXEL_KEYS", "MediaOptions"]

PIXEL_KEYS = frozenset({"min_pixels", "max_pixels", "resized_height", "resized_width"})
_MOST = 1 << 31  # upper bound of every number of the options
_MOST_S = 1e6  # seconds of a video
_FPS = (1e-3, 1e3)
# qwen-vl-utils' bounds on the tokens of a frame, for a message without min_pixels and max_pixels;
# the second pair applies with resized_height and resized_width. _VIDEO_TOKENS bounds a whole video.
_FRAME_TOKENS, _RESIZED_TOKENS = (128, 768), (4, 16384)
_VIDEO_TOKENS = 128_000


@dataclass(frozen=True)
class MediaOptions:
    """The options that a message sets; None: as in the checkpoint's processor files.

    Attributes:
        min_pixels, max_pixels: bounds on height * width after resizing.
        resized_height, resized_width: pixels to resize to, in place of the image's own size. Bounds
            and rounding to whole tokens apply afterwards.
        total_pixels: bound on the pixels of all frame pairs of a video.
        fps: frames per second to sample from a video file; for a list of frames, ``sample_fps``.
        nframes: frames to sample from a video file, in place of a rate.
        min_frames, max_frames: bounds on the frames that a rate samples.
        video_start, video_end: sample a video file between these seconds.
        sample_fps: frame rate of a list of frames.
        timestamps: seconds of the frames of a list, in place of a rate.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None
    total_pixels: int | None = None
    fps: float | None = None
    nframes: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    video_start: float | None = None
    video_end: float | None = None
    sample_fps: float | None = None
    timestamps: tuple[float, ...] | None = None

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str) -> MediaOptions:
        """Check and convert ``values``, keyed by attribute name. ``where``: their path in errors.

        Raises:
            UserError: a value has a wrong type or is out of range, or two options conflict.
        """
        given = {name: _READERS[name](value, f"{where}.{name}") for name, value in values.items()}
        options = cls(**given)
        options._check(where)
        return options

    def _check(self, where: str) -> None:
        if (self.resized_height is None) != (self.resized_width is None):
            raise UserError(
                f"{where}.resized_height: expected resized_height and resized_width, got one of "
                "them. Give both."
            )
        if self.fps is not None and self.nframes is not None:
            raise UserError(f"{where}.nframes: expected fps or nframes, got both. Give one.")
        if self.sample_fps is not None and self.timestamps is not None:
            raise UserError(
                f"{where}.timestamps: expected sample_fps or timestamps, got both. Give one."
            )
        for least, most in (
            ("min_pixels", "max_pixels"),
            ("min_frames", "max_frames"),
            ("video_start", "video_end"),
        ):
            low, high = getattr(self, least), getattr(self, most)
            if low is not None and high is not None and low > high:
                raise UserError(
                    f"{where}.{least}: expected at most {most} ({high:g}), got {low:g}. Swap them."
                )

    def of_image(self, config: PixelConfig) -> PixelConfig:
        """Apply these options to the image ``config``."""
        return _changed(
            config,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
            resized=self._resized,
        )

    def of_video(self, config: PixelConfig) -> PixelConfig:
        """Apply these options to the video ``config``.

        Pixels bound each frame. If the family bounds all frames jointly, qwen-vl-utils' bounds of a
        frame apply where the message sets none.
        """
        config = self.of_image(self._per_frame(config))
        config = _changed(
            config,
            max_total_pixels=self.total_pixels,
            min_frames=self.min_frames,
            max_frames=self.max_frames,
            first_s=self.video_start,
            last_s=self.video_end,
        )
        if self.fps is not None:
            return replace(config, fps=self.fps, num_frames=None)
        return _changed(config, num_frames=self.nframes)

    @property
    def _resized(self) -> tuple[int, int] | None:
        if self.resized_height is None or self.resized_width is None:
            return None
        return self.resized_height, self.resized_width

    def _per_frame(self, config: PixelConfig) -> PixelConfig:
        asked = (self.min_pixels, self.max_pixels, self.total_pixels, self._resized)
        if config.per_frame or config.tile_side is not None or asked == (None,) * len(asked):
            return config
        area = config.factor**2
        least, most = _FRAME_TOKENS if self._resized is None else _RESIZED_TOKENS
        return replace(
            config,
            per_frame=True,
            min_pixels=least * area,
            max_pixels=most * area,
            max_frame_tokens=None,
            max_video_tokens=_VIDEO_TOKENS,
        )


NO_MEDIA_OPTIONS = MediaOptions()


def _changed(config: PixelConfig, **changes: Any) -> PixelConfig:
    """Apply the changes that are not None."""
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(config, **given) if given else config


def _whole(value: Any, where: str) -> int:
    if not _is_number(value) or value != int(value) or not 1 <= value < _MOST:
        raise UserError(
            f"{where}: expected a whole number from 1 to {_MOST - 1}, got {quote(value, 40)}."
        )
    return int(value)


def _rate(value: Any, where: str) -> float:
    if not _is_number(value) or not _FPS[0] <= value <= _FPS[1]:
        raise UserError(
            f"{where}: expected frames a second from {_FPS[0]:g} to {_FPS[1]:g}, got "
            f"{quote(value, 40)}."
        )
    return float(value)


def _second(value: Any, where: str) -> float:
    if not _is_number(value) or not 0 <= value <= _MOST_S:
        raise UserError(f"{where}: expected seconds from 0 to {_MOST_S:g}, got {quote(value, 40)}.")
    return float(value)


def _seconds(value: Any, where: str) -> tuple[float, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise UserError(
            f"{where}: expected a list with the second of each frame, got {quote(value, 40)}."
        )
    seconds = tuple(_second(each, f"{where}[{i}]") for i, each in enumerate(value))
    if list(seconds) != sorted(seconds):
        raise UserError(f"{where}: expected seconds in ascending order. Sort the frames.")
    return seconds


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST


_READERS: Mapping[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys((*PIXEL_KEYS, "total_pixels", "nframes", "min_frames", "max_frames"), _whole),
    **dict.fromkeys(("fps", "sample_fps"), _rate),
    **dict.fromkeys(("video_start", "video_end"), _second),
    "timestamps": _seconds,
}
