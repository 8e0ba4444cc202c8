"""Decode frames of a video file one by one with PyAV.

Decoder processes import this module, so it does not import torch.
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
"""The frame rate that transformers assumes for a sampled video without a stated rate."""

# Self-contained containers. FFmpeg also reads playlists, which name further files to open.
_CONTAINERS = ((4, b"ftyp", "mp4"), (0, b"\x1a\x45\xdf\xa3", "matroska"), (8, b"AVI ", "avi"))

Frame = NDArray[np.uint8]


def frame_indices(total: int, fps: float, config: PixelConfig, first: int = 0) -> NDArray[np.int64]:
    """Return the indices of the frames to use, by the rules of transformers' video processors.

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
    """Check, as transformers does, that the video has the requested number of frames.

    Raises:
        UserError: ``config.num_frames`` cannot be taken from ``total``.
    """
    least = 1 if config.sampling == "ends" else config.temporal_patch_size
    wanted = config.num_frames
    if config.sampling != "middles" and wanted is not None and not least <= wanted <= total:
        raise UserError(
            f"{name}: nframes: expected from {least} to the video's {total}, got {wanted}."
        )


def _span(name: str, total: int, fps: float, config: PixelConfig) -> tuple[int, int]:
    """Return the first frame and the frame count between the requested seconds (qwen-vl-utils)."""
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
    """Choose frames by ``Qwen2VLVideoProcessor``'s rule: a multiple of the temporal patch size.

    If the video has fewer frames than that, choose a single frame.
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
    """Reproduce ``torch.arange`` of floats: rounded to float32, then down.

    In 1 of 18,000 cases torch's vector code rounds a step otherwise, and a frame is off by one.
    """
    return np.arange(start, stop, step).astype(np.float32).astype(np.int64)


@dataclass(frozen=True)
class FrameTimes:
    """The times of the sampled frames.

    Attributes:
        seconds: the second of each frame.
        fps: number of sampled frames per second.
    """

    seconds: tuple[float, ...]
    fps: float


def check_video_pixels(name: str, count: int, policy: MediaPolicy) -> None:
    """Check the pixels of a video's used frames in all.

    Raises:
        UserError: there are more than ``policy.max_video_pixels``.
    """
    if policy.max_video_pixels is not None and count > policy.max_video_pixels:
        raise UserError(
            f"{name}: {count} pixels in its frames, the limit is {policy.max_video_pixels}. "
            "Send fewer or smaller frames."
        )


class VideoFile:
    """A video file that can be opened more than once, from a path or from bytes in memory."""

    def __init__(self, source: Path | bytes, name: str, policy: MediaPolicy) -> None:
        """Check that the file exists and its container is supported.

        Raises:
            UserError: the file does not exist, or the container of the bytes is unsupported.
        """
        self._source, self._name, self._policy = source, name, policy
        self._format: str | None = None
        if isinstance(source, bytes):
            formats = [
                kind for place, magic, kind in _CONTAINERS if source[place:].startswith(magic)
            ]
            if not formats:
                raise UserError(
                    f"{name}: not a supported video. Give an MP4, MOV, WebM, MKV or AVI."
                )
            self._format = formats[0]
        elif not source.is_file():
            raise UserError(f"{name}: no such file or folder. Check the path.")

    def sample(
        self, config: PixelConfig, fps: float | None = None, max_frames: int | None = None
    ) -> Generator[FrameTimes | Frame]:
        """Yield the times of the used frames, then these frames as uint8 [H, W, 3].

        There are fewer frames than times if the file ends before its stated length. Call again with
        ``max_frames`` then. The file stays open until the generator is exhausted or closed.

        Args:
            fps: frames per second, in place of the file's rate.
            max_frames: use at most the first ``max_frames``.
        Raises:
            UserError: the file cannot be decoded, or is larger than the policy allows.
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
        """Return the indices of the used frames, their rate, and the number available."""
        if not container.streams.video:
            raise UserError(f"{self._name}: holds no video stream. Give a video file.")
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise UserError(f"{self._name}: its video has an unknown codec. Encode it as H.264.")
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
        """Check the number of used frames before they are listed: a file may claim any number."""
        most = total if config.sampling == "middles" else min(config.max_frames, total)
        count = config.num_frames or min(
            max(int(total / fps * config.fps), config.min_frames), most
        )
        limit = self._policy.max_video_frames
        if limit is not None and count > limit:
            raise UserError(
                f"{self._name}: {count} frames to use, the limit is {limit}. Request fewer."
            )

    def _open(self) -> Any:
        import av

        if isinstance(self._source, bytes):
            return av.open(io.BytesIO(self._source), format=self._format)
        return av.open(str(self._source))

    def _count_frames(self) -> int:
        """Count the frames by decoding: some containers do not state their number."""
        with self._open() as container:
            return sum(1 for _ in self._frames(container))

    def _decode(self, container: Any, wanted: Sequence[int]) -> Iterator[Frame]:
        chosen = frozenset(wanted)
        size = None
        for i, frame in self._frames(container):
            if i in chosen:
                # frames may differ in size from the file's stated size
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
