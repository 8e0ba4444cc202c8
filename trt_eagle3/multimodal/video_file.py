"""Frames of a video file, one by one as PyAV decodes them.

No torch here: decoder processes import this module.
"""

from __future__ import annotations

import io
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.multimodal.image import check_pixels
from trt_eagle3.multimodal.pixel_config import PixelConfig
from trt_eagle3.multimodal.policy import MediaPolicy

__all__ = ["UNKNOWN_FPS", "FrameTimes", "VideoFile", "check_video_pixels", "frame_indices"]

UNKNOWN_FPS = 24.0
"""What transformers assumes of a video to be sampled that does not say."""

# Containers that hold their own data. FFmpeg would also take playlists, which name further files to
# open.
_CONTAINERS = ((4, b"ftyp", "mp4"), (0, b"\x1a\x45\xdf\xa3", "matroska"), (8, b"AVI ", "avi"))

Frame = NDArray[np.uint8]


def frame_indices(total: int, fps: float, config: PixelConfig, first: int = 0) -> NDArray[np.int64]:
    """Numbers of the frames to use, by the rules of transformers' video processors.

    ``total`` frames at ``fps`` are available, numbered from ``first`` on.
    """
    if config.sampling == "steps":
        return first + _every_so_many(total, fps, config)
    if config.sampling == "middles":
        count = config.num_frames or int(total / fps * config.fps)
        count = min(max(count, 1), total)
        return first + _float32_range(total / count / 2, total, total / count)[:count]
    count = min(max(int(total / fps * config.fps), config.min_frames), config.max_frames, total)
    count = count if config.num_frames is None else config.num_frames
    return np.linspace(first, first + total - 1, count).round().astype(np.int64)


def check_num_wanted(name: str, total: int, config: PixelConfig) -> None:
    """Refuse a number of frames that the video cannot give, as transformers does.

    Raises:
        UserError: ``config.num_frames`` of ``total`` cannot be taken.
    """
    least = 1 if config.sampling == "ends" else config.temporal_patch_size
    wanted = config.num_frames
    if config.sampling != "middles" and wanted is not None and not least <= wanted <= total:
        raise UserError(
            f"{name}: nframes: expected from {least} to the video's {total}, got {wanted}."
        )


def _span(name: str, total: int, fps: float, config: PixelConfig) -> tuple[int, int]:
    """First frame and number of frames between the requested seconds, by qwen-vl-utils' rule."""
    if config.first_s is None and config.last_s is None:
        return 0, total
    first = math.ceil(min(config.first_s or 0.0, total / fps) * fps)
    last = total - 1
    if config.last_s is not None:
        last = min(math.floor(min(config.last_s, total / fps) * fps), last)
    if first >= last:
        raise UserError(
            f"{name}: video_start and video_end: expected two frames or more between them, got "
            f"frames {first} to {last} of a video of {total / fps:.2f} s."
        )
    return first, last - first + 1


def _every_so_many(total: int, fps: float, config: PixelConfig) -> NDArray[np.int64]:
    """``Qwen2VLVideoProcessor``'s rule: whole temporal patches of frames; a single frame where
    there are no more.
    """
    group = config.temporal_patch_size
    if config.num_frames is None:
        most = min(config.max_frames, total) // group * group
        wanted = min(max(total / fps * config.fps, config.min_frames), most, total)
        count = int(wanted // group * group)
    else:
        count = min(round(config.num_frames / group) * group, total // group * group)
    return _float32_range(0, total, total / count)[:count] if count else np.arange(min(total, 1))


def _float32_range(start: float, stop: float, step: float) -> NDArray[np.int64]:
    """``torch.arange`` of floats, which are rounded to float32, and then down.

    Where torch's own vectors round a step otherwise (1 of 18,000 cases), a frame is the next.
    """
    return np.arange(start, stop, step).astype(np.float32).astype(np.int64)


@dataclass(frozen=True)
class FrameTimes:
    """When the frames that are used were taken.

    Attributes:
        seconds: of each. fps: how many of them there are in a second.
    """

    seconds: tuple[float, ...]
    fps: float


def check_video_pixels(name: str, count: int, policy: MediaPolicy) -> None:
    """Refuse a video whose used frames have too many pixels in all.

    Raises:
        UserError: more than ``policy.max_video_pixels``.
    """
    if policy.max_video_pixels is not None and count > policy.max_video_pixels:
        raise UserError(
            f"{name}: {count} pixels in its frames, the limit is {policy.max_video_pixels}. "
            "Send fewer or smaller frames."
        )


class VideoFile:
    """A video file that can be opened more than once: a path as it is, anything else as bytes in
    memory.
    """

    def __init__(self, source: Path | bytes, name: str, policy: MediaPolicy) -> None:
        """Check that there is a file.

        Raises:
            UserError: no such file, or bytes in no container that is read here.
        """
        self._source, self._name, self._policy = source, name, policy
        self._format: str | None = None
        if isinstance(source, bytes):
            formats = [
                kind for place, magic, kind in _CONTAINERS if source[place:].startswith(magic)
            ]
            if not formats:
                raise UserError(
                    f"{name}: not a video that is read here. Give an MP4, MOV, WebM, MKV or AVI."
                )
            self._format = formats[0]
        elif not source.is_file():
            raise UserError(f"{name}: no such file or folder. Check the path.")

    def sample(
        self, config: PixelConfig, fps: float | None = None, max_frames: int | None = None
    ) -> Generator[FrameTimes | Frame]:
        """First when each frame that is used was taken, then these frames as uint8 [H, W, 3].

        There are fewer frames than seconds where the file ends before it says; ask again with
        ``max_frames`` then. The file is open until the generator is exhausted or closed.

        Args:
            fps: frames per second, instead of what the file says. max_frames: use no more than the
                first ones.
        Raises:
            UserError: an undecodable file, or one that is larger than the policy allows.
            EnvironmentMissingError: PyAV is not installed.
        """
        try:
            import av
        except ImportError as error:
            raise EnvironmentMissingError(
                f"{self._name}: reading video files needs PyAV. Run: pip install av, or give a "
                "folder of frames."
            ) from error
        try:
            with self._open() as container:
                wanted, rate, total = self._choose(container, config, fps)
                seconds = tuple(i / rate for i in wanted[:max_frames])
                yield FrameTimes(seconds, len(wanted) / total * rate)
                yield from self._decode(container, wanted[:max_frames])
        except (av.error.FFmpegError, ValueError, OverflowError) as error:
            if isinstance(error, UserError):
                raise
            again = "Encode or download it again."
            raise UserError(
                f"{self._name}: not a video that can be decoded ({error}). {again}"
            ) from error

    def _choose(
        self, container: Any, config: PixelConfig, fps: float | None
    ) -> tuple[list[int], float, int]:
        """Numbers of the frames to use, frames per second, and how many frames were available."""
        if not container.streams.video:
            raise UserError(f"{self._name}: holds no video stream. Give a video file.")
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise UserError(
                f"{self._name}: its video is in a codec unknown here. Encode it as H.264."
            )
        check_pixels(self._name, stream.width, stream.height, self._policy)
        rate, total = stream.average_rate, stream.frames or self._count_frames()
        if total <= 0:
            raise UserError(f"{self._name}: holds no frames. Encode or download it again.")
        fps = fps or (float(rate) if rate else UNKNOWN_FPS)
        first, count = _span(self._name, total, fps, config)
        check_num_wanted(self._name, count, config)
        self._check_num_frames(count, fps, config)
        wanted = frame_indices(count, fps, config, first).tolist()
        check_video_pixels(self._name, stream.width * stream.height * len(wanted), self._policy)
        return wanted, fps, count

    def _check_num_frames(self, total: int, fps: float, config: PixelConfig) -> None:
        """Refuse to use too many frames before they are numbered: a file may say that it has any
        number.
        """
        most = total if config.sampling == "middles" else min(config.max_frames, total)
        count = config.num_frames or min(
            max(int(total / fps * config.fps), config.min_frames), most
        )
        limit = self._policy.max_video_frames
        if limit is not None and count > limit:
            raise UserError(
                f"{self._name}: {count} frames of it, the limit is {limit}. Ask for fewer."
            )

    def _open(self) -> Any:
        import av

        if isinstance(self._source, bytes):
            return av.open(io.BytesIO(self._source), format=self._format)
        return av.open(str(self._source))

    def _count_frames(self) -> int:
        """Some containers do not say how many frames they hold; then they are counted."""
        with self._open() as container:
            return sum(1 for _ in self._frames(container))

    def _decode(self, container: Any, wanted: Sequence[int]) -> Iterator[Frame]:
        chosen = frozenset(wanted)
        size = None
        for i, frame in self._frames(container):
            if i in chosen:
                # what the frames are need not be what the file says
                check_pixels(self._name, frame.width, frame.height, self._policy)
                size = size or (frame.width, frame.height)
                if size != (frame.width, frame.height):
                    raise UserError(
                        f"{self._name}: frame {i} is {frame.width}x{frame.height}, the first is "
                        f"{size[0]}x{size[1]}. Encode it at one size."
                    )
                yield frame.to_ndarray(format="rgb24")
            if i >= wanted[-1]:
                return

    def _frames(self, container: Any) -> Iterator[tuple[int, Any]]:
        limit = self._policy.max_video_frames
        for i, frame in enumerate(container.decode(video=0)):
            if limit is not None and i >= limit:
                raise UserError(f"{self._name}: more than {limit} frames. Send a shorter one.")
            yield i, frame
