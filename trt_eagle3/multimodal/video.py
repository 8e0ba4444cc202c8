"""A video as frames with times: from a list of images, a folder of frames, or a file (PyAV, the ``video`` extra).

A file is given as a path, as its bytes, as a ``data:video/...;base64,`` URI, or as an URL of an allowed host.

Lists and folders are taken as already sampled: every frame is used, at ``Video.fps`` frames per second (default 2, the
rate Qwen3-VL samples at). Files, and a `Video` with ``sample=True``, are sampled as transformers does: at the config's
rate, between its least and most frames, evenly from the first frame to the last.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.multimodal.fetch import read_media, scheme
from trt_eagle3.multimodal.image import ImageSource, check_pixels, load_image
from trt_eagle3.multimodal.pixel_config import PixelConfig
from trt_eagle3.multimodal.policy import LOCAL_MEDIA, MediaPolicy

__all__ = ["LoadedVideo", "Video", "VideoSource", "frame_indices", "load_video", "patch_times"]

_FRAME_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_UNKNOWN_FPS = 24.0  # what transformers assumes of a video to be sampled that does not say
# Containers that hold their own data. FFmpeg would also take playlists, which name further files to open.
_CONTAINERS = ((4, b"ftyp", "mp4"), (0, b"\x1a\x45\xdf\xa3", "matroska"), (8, b"AVI ", "avi"))


@dataclass(frozen=True)
class Video:
    """Frames and when they were taken.

    Attributes:
        frames: images, a folder of frames, or a video file (a path, bytes, a data URI, an URL).
        fps: frames per second of what is given. A file knows its own, and this overrides it.
        sample: take frames at the processor's rate, as from a file, instead of all. Files are always sampled.
        timestamps: seconds of each frame; replaces ``fps`` and excludes ``sample``.
    """

    frames: Sequence[ImageSource] | str | Path | bytes
    fps: float | None = None
    sample: bool = False
    timestamps: Sequence[float] | None = None


VideoSource = Video | Sequence[ImageSource] | str | Path | bytes
"""A `Video`, a list of images, a folder of frames (natural order of names), or a video file as `Video.frames`."""


@dataclass(frozen=True)
class LoadedVideo:
    """Frames that go to the model: uint8 [F, H, W, 3], and the second at which each was taken."""

    frames: Tensor
    times: tuple[float, ...]


def load_video(
    source: VideoSource, config: PixelConfig, name: str = "video", policy: MediaPolicy = LOCAL_MEDIA
) -> LoadedVideo:
    """Frames and times of a video, sampled where the source is to be sampled.

    Args:
        policy: which sources, formats and sizes are taken.
    Raises:
        UserError: a source or size that the policy excludes, nothing there, frames of different sizes, a rate or times
            that make no sense, an undecodable file.
        EnvironmentMissingError: a file, and PyAV is not installed.
    """
    video = source if isinstance(source, Video) else Video(source)
    _check(video, name)
    if isinstance(video.frames, str | Path | bytes):
        folder = _folder(video.frames) if policy.paths else None
        if folder is None:
            return _from_file(video, config, _named(name, video.frames), policy)
        name = f"{name} {folder}"
        sources: Sequence[ImageSource] = _folder_frames(folder, name)
    else:
        sources = video.frames
    if len(sources) == 0:
        raise UserError(f"{name}: no frames. Give at least {config.temporal_patch_size} images.")
    fps = video.fps or (_UNKNOWN_FPS if video.sample else config.fps)
    indices = frame_indices(len(sources), fps, config) if video.sample else np.arange(len(sources))
    frames = _stack(_load_frames(sources, indices.tolist(), name, policy), name)
    if video.timestamps is not None:
        if len(video.timestamps) != len(sources):
            raise UserError(
                f"{name}: {len(video.timestamps)} timestamps for {len(sources)} frames. Give one per frame."
            )
        return LoadedVideo(frames, tuple(float(second) for second in video.timestamps))
    return LoadedVideo(frames, tuple(int(i) / fps for i in indices))


def frame_indices(total: int, fps: float, config: PixelConfig) -> NDArray[np.int64]:
    """Which of ``total`` frames taken at ``fps`` to use: transformers' rule."""
    count = min(max(int(total / fps * config.fps), config.min_frames), config.max_frames, total)
    return np.linspace(0, total - 1, count).round().astype(np.int64)


def patch_times(times: Sequence[float], temporal_patch_size: int) -> list[float]:
    """Second written before each temporal patch: the mean of its first and its last frame."""
    padded = [*times, *[times[-1]] * (-len(times) % temporal_patch_size)]
    last = temporal_patch_size - 1
    return [(padded[i] + padded[i + last]) / 2 for i in range(0, len(padded), temporal_patch_size)]


def _check(video: Video, name: str) -> None:
    if video.fps is not None and not 0 < video.fps < float("inf"):
        raise UserError(f"{name}: fps: expected a positive number, got {video.fps}. Give the frames per second.")
    frames: object = video.frames
    if not isinstance(frames, str | Path | bytes | Sequence):
        kind = type(frames).__name__
        raise UserError(f"{name}: expected a list of images, a folder or a file, got {kind}. Write it to a file first.")
    if video.timestamps is not None and (video.sample or video.fps is not None):
        raise UserError(f"{name}: timestamps exclude fps and sample. Give one of them.")


def _folder(frames: str | Path | bytes) -> Path | None:
    if isinstance(frames, bytes) or (isinstance(frames, str) and scheme(frames) not in {"", "file"}):
        return None
    path = Path(str(frames).removeprefix("file://"))
    return path if path.is_dir() else None


def _named(name: str, frames: str | Path | bytes) -> str:
    if isinstance(frames, bytes):
        return f"{name} ({len(frames)} bytes)"
    return f"{name} {str(frames) if len(str(frames)) <= 200 else str(frames)[:40] + '...'}"


def _load_frames(sources: Sequence[ImageSource], indices: Sequence[int], name: str, policy: MediaPolicy) -> list[Any]:
    images: list[Any] = []
    num_pixels = 0
    for i in indices:
        images.append(load_image(sources[i], f"{name}, frame {i}", policy))
        num_pixels += images[-1].width * images[-1].height
        _check_video_pixels(name, num_pixels, policy)
    return images


def _check_video_pixels(name: str, count: int, policy: MediaPolicy) -> None:
    if policy.max_video_pixels is not None and count > policy.max_video_pixels:
        raise UserError(
            f"{name}: {count} pixels in its frames, the limit is {policy.max_video_pixels}. "
            "Send fewer or smaller frames."
        )


def _folder_frames(folder: Path, name: str) -> list[Path]:
    found = [path for path in folder.iterdir() if path.suffix.lower() in _FRAME_SUFFIXES]
    if not found:
        kinds = " ".join(sorted(_FRAME_SUFFIXES))
        raise UserError(f"{name}: no frames in this folder. Put image files there ({kinds}).")
    return sorted(found, key=_natural_key)


def _natural_key(path: Path) -> list[tuple[int, int, str]]:
    # frame2 before frame10
    parts = re.split(r"(\d+)", path.name)
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts]


def _stack(images: Sequence[Any], name: str) -> Tensor:
    first = images[0].size
    for i, image in enumerate(images):
        if image.size != first:
            raise UserError(
                f"{name}: frame {i} is {image.width}x{image.height}, frame 0 is {first[0]}x{first[1]}. "
                "Resize all frames to one size."
            )
    return torch.from_numpy(np.stack([np.asarray(image) for image in images]))


def _from_file(video: Video, config: PixelConfig, name: str, policy: MediaPolicy) -> LoadedVideo:
    if video.timestamps is not None:
        raise UserError(f"{name}: a video file has its own times. Leave timestamps out.")
    file = _File(video.frames, name, policy)
    try:
        import av
    except ImportError as error:
        raise EnvironmentMissingError(
            f"{name}: reading video files needs PyAV. Run: pip install av, or give a folder of frames."
        ) from error
    try:
        with file.open() as container:
            if not container.streams.video:
                raise UserError(f"{name}: holds no video stream. Give a video file.")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise UserError(f"{name}: its video is in a codec unknown here. Encode it as H.264.")
            check_pixels(name, stream.width, stream.height, policy)
            rate, total = stream.average_rate, stream.frames or file.count_frames()
            if total <= 0:
                raise UserError(f"{name}: holds no frames. Encode or download it again.")
            fps = video.fps or (float(rate) if rate else _UNKNOWN_FPS)
            wanted = frame_indices(total, fps, config)
            _check_video_pixels(name, stream.width * stream.height * len(wanted), policy)
            kept = dict(file.decode(container, wanted))
    except (av.error.FFmpegError, ValueError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name}: not a video that can be decoded ({error}). Encode or download it again.") from error
    if not kept:
        raise UserError(f"{name}: no frame could be decoded. Encode or download it again.")
    return LoadedVideo(torch.from_numpy(np.stack(list(kept.values()))), tuple(i / fps for i in kept))


class _File:
    """A video file that can be opened more than once: a path as it is, anything else as bytes in memory."""

    def __init__(self, source: Any, name: str, policy: MediaPolicy) -> None:
        self._name, self._policy = name, policy
        self._path: Path | None = None
        if policy.paths and not isinstance(source, bytes) and scheme(str(source)) in {"", "file"}:
            self._path = Path(str(source).removeprefix("file://"))
            if not self._path.is_file():
                raise UserError(f"{name}: no such file or folder. Check the path.")
            return
        self._data = read_media(source, name, policy)
        formats = [kind for place, magic, kind in _CONTAINERS if self._data[place:].startswith(magic)]
        if not formats:
            raise UserError(f"{name}: not a video that is read here. Give an MP4, MOV, WebM, MKV or AVI.")
        self._format = formats[0]

    def open(self) -> Any:
        import av

        return av.open(str(self._path)) if self._path else av.open(io.BytesIO(self._data), format=self._format)

    def count_frames(self) -> int:
        """Some containers do not say how many frames they hold; then they are counted."""
        with self.open() as container:
            return sum(1 for _ in self._frames(container))

    def decode(self, container: Any, wanted: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """The wanted frames as uint8 [H, W, 3], by their number."""
        chosen = frozenset(wanted.tolist())
        size = None
        for i, frame in self._frames(container):
            if i in chosen:
                # what the frames are need not be what the file says
                check_pixels(self._name, frame.width, frame.height, self._policy)
                size = size or (frame.width, frame.height)
                if size != (frame.width, frame.height):
                    raise UserError(
                        f"{self._name}: frame {i} is {frame.width}x{frame.height}, the first is {size[0]}x{size[1]}. "
                        "Encode it at one size."
                    )
                yield i, frame.to_ndarray(format="rgb24")
            if i >= wanted[-1]:
                return

    def _frames(self, container: Any) -> Iterator[tuple[int, Any]]:
        limit = self._policy.max_video_frames
        for i, frame in enumerate(container.decode(video=0)):
            if limit is not None and i >= limit:
                raise UserError(f"{self._name}: more than {limit} frames. Send a shorter one.")
            yield i, frame
