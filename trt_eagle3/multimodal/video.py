"""Load a video as frames with times, from a list of images, a folder of frames, or a file.

A file is given as a path, as its bytes, as a ``data:video/...;base64,`` URI, or as a URL of an
allowed host. Reading files needs PyAV (the ``video`` extra). A URI
``data:video/jpeg;base64,FRAME,FRAME,...`` is a list of images.

Lists and folders count as already sampled: every frame is used, at ``Video.fps`` frames per second
(default 2, the sampling rate of Qwen3-VL). Files, and a `Video` with ``sample=True``, are sampled
as transformers does: at the config's rate, within its bounds on frames, evenly from the first frame
to the last.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.caller import NO_CALLER, Caller
from trt_eagle3.multimodal.fetch import (
    check_num_frames,
    is_frame_list,
    read_media,
    scheme,
    split_frames,
)
from trt_eagle3.multimodal.image import ImageSource, load_image, read_image
from trt_eagle3.multimodal.media_job import JobRunner, MediaJob, MediaPart, run_here
from trt_eagle3.multimodal.media_options import NO_MEDIA_OPTIONS, MediaOptions
from trt_eagle3.multimodal.pixel_config import PixelConfig
from trt_eagle3.multimodal.policy import LOCAL_MEDIA, MediaPolicy
from trt_eagle3.multimodal.video_file import UNKNOWN_FPS, check_video_pixels, frame_indices

__all__ = [
    "LoadedVideo",
    "Video",
    "VideoSource",
    "VideoStream",
    "load_video",
    "open_video",
    "patch_times",
]

_FRAME_SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
_AHEAD = 4  # images of a list decoded concurrently

Frame = NDArray[np.uint8]
_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Video:
    """Frames and their times.

    Attributes:
        frames: images, a folder of frames, or a video file (a path, bytes, a data URI, a URL).
        fps: frames per second of ``frames``; overrides the rate of a file.
        sample: sample frames at the processor's rate, as from a file, in place of using all. Files
            are always sampled.
        timestamps: seconds of each frame; replaces ``fps`` and excludes ``sample``.
    """

    frames: Sequence[ImageSource] | str | Path | bytes
    fps: float | None = None
    sample: bool = False
    timestamps: Sequence[float] | None = None


VideoSource = Video | Sequence[ImageSource] | str | Path | bytes
"""A `Video`, a list of images, a folder of frames (in natural order of names), or a video file as
in `Video.frames`.
"""


@dataclass(frozen=True)
class LoadedVideo:
    """The frames for the model.

    Attributes:
        frames: uint8 [F, H, W, 3].
        times: the second of each frame.
        fps: number of these frames per second.
    """

    frames: Tensor
    times: tuple[float, ...]
    fps: float


@dataclass(frozen=True)
class VideoStream:
    """Frames that are decoded lazily.

    Attributes:
        times: the second of each frame.
        frames: uint8 [H, W, 3], all of one size. There are fewer than ``times`` if a file ends
            before its stated length.
        fps: number of these frames per second.
    """

    times: tuple[float, ...]
    frames: Iterator[Frame]
    fps: float


def load_video(
    source: VideoSource, config: PixelConfig, *, policy: MediaPolicy = LOCAL_MEDIA
) -> LoadedVideo:
    """Load all frames and times of a video, sampled if the source requires it.

    Raises:
        UserError, EnvironmentMissingError: as for `open_video`.
    """
    with open_video(source, config, policy=policy) as stream:
        frames = list(stream.frames)
    pixels = torch.from_numpy(np.stack(frames))
    return LoadedVideo(pixels, stream.times[: len(frames)], stream.fps)


@contextmanager
def open_video(
    source: VideoSource,
    config: PixelConfig,
    name: str = "video",
    policy: MediaPolicy = LOCAL_MEDIA,
    run: JobRunner = run_here,
    max_frames: int | None = None,
    caller: Caller = NO_CALLER,
    options: MediaOptions = NO_MEDIA_OPTIONS,
) -> Iterator[VideoStream]:
    """Decode a video frame by frame, sampled if the source requires it.

    Leaving the context ends the decoding, even if frames are unread.

    Args:
        policy: permitted sources, formats and sizes.
        run: runs the decoding jobs.
        max_frames: use at most the first ``max_frames``.
        caller: the request.
        options: times of the frames of a list or folder.
    Raises:
        UserError: raised here or with a frame. The policy excludes the source or a size, there is
            no frame, frames differ in size, the rate or times are invalid, or the file cannot be
            decoded.
        EnvironmentMissingError: PyAV is needed for a file and is not installed.
        RequestCancelledError: ``caller`` was cancelled.
    """
    video = source if isinstance(source, Video) else Video(source)
    _check(video, name)
    if isinstance(video.frames, str) and is_frame_list(video.frames):
        video = replace(video, frames=split_frames(video.frames, name, policy))
    if isinstance(video.frames, str | Path | bytes):
        folder = _folder(video.frames) if policy.paths else None
        if folder is None:
            job = MediaJob(
                "video",
                _named(name, video.frames),
                policy,
                config,
                fps=video.fps,
                max_frames=max_frames,
            )
            with _open_file(video, job, run, caller) as stream:
                yield stream
            return
        name = f"{name} {folder}"
        sources: Sequence[ImageSource] = _folder_frames(folder, name)
    else:
        sources = video.frames
    video = _timed(video, options)
    _check(video, name)
    check_num_frames(len(sources), name, policy)
    if len(sources) == 0:
        raise UserError(f"{name}: no frames. Give at least {config.temporal_patch_size} images.")
    fps = video.fps or (UNKNOWN_FPS if video.sample else config.fps)
    indices = frame_indices(len(sources), fps, config) if video.sample else np.arange(len(sources))
    times = tuple(int(i) / fps for i in indices)
    used_fps = len(indices) / len(sources) * fps
    if video.timestamps is not None:
        if len(video.timestamps) != len(sources):
            raise UserError(
                f"{name}: {len(video.timestamps)} timestamps for {len(sources)} frames. Give one "
                "per frame."
            )
        times = tuple(float(second) for second in video.timestamps)
        used_fps = _mean_fps(times, config.fps)

    over = Event()
    caller = caller.unless(over.is_set)

    def decode(i: int) -> Frame:
        return _decode_frame(
            sources[i], MediaJob("frame", f"{name}, frame {i}", policy, config), run, caller
        )

    with closing(_ahead(decode, indices.tolist())) as frames:
        try:
            yield VideoStream(times, _checked(frames, name, policy), used_fps)
        finally:
            over.set()  # do not wait for frames that are being decoded


def _mean_fps(times: Sequence[float], default: float) -> float:
    """Return the mean rate of frames with known times only."""
    span = times[-1] - times[0]
    return (len(times) - 1) / span if span > 0 else default


def patch_times(times: Sequence[float], temporal_patch_size: int) -> list[float]:
    """Return the second written before each temporal patch: the mean of its end frames."""
    padded = [*times, *[times[-1]] * (-len(times) % temporal_patch_size)]
    last = temporal_patch_size - 1
    return [(padded[i] + padded[i + last]) / 2 for i in range(0, len(padded), temporal_patch_size)]


def _check(video: Video, name: str) -> None:
    if video.fps is not None and not 0 < video.fps < float("inf"):
        raise UserError(
            f"{name}: fps: expected a positive number, got {video.fps}. Give the frames per second."
        )
    frames: object = video.frames
    if not isinstance(frames, str | Path | bytes | Sequence):
        kind = type(frames).__name__
        raise UserError(
            f"{name}: expected a list of images, a folder or a file, got {kind}. Write it to a "
            "file first."
        )
    if video.timestamps is not None and (video.sample or video.fps is not None):
        raise UserError(f"{name}: timestamps exclude fps and sample. Give one of them.")


def _timed(video: Video, options: MediaOptions) -> Video:
    """Apply the message's times to a list or folder of frames."""
    if options.timestamps is not None:
        return replace(video, timestamps=options.timestamps, fps=None)
    if options.sample_fps is not None:
        return replace(video, fps=options.sample_fps, timestamps=None)
    return video


def _folder(frames: str | Path | bytes) -> Path | None:
    if isinstance(frames, bytes) or (
        isinstance(frames, str) and scheme(frames) not in {"", "file"}
    ):
        return None
    path = Path(str(frames).removeprefix("file://"))
    return path if path.is_dir() else None


def _named(name: str, frames: str | Path | bytes) -> str:
    if isinstance(frames, bytes):
        return f"{name} ({len(frames)} bytes)"
    return f"{name} {str(frames) if len(str(frames)) <= 200 else str(frames)[:40] + '...'}"


def _decode_frame(source: ImageSource, job: MediaJob, run: JobRunner, caller: Caller) -> Frame:
    caller.check()
    if isinstance(source, Image.Image | np.ndarray):
        return np.asarray(load_image(source, job.name, job.policy))
    with run(job, read_image(source, job.name, job.policy, caller)) as parts:
        [part] = parts
    assert part.array is not None
    return part.array


def _ahead(function: Callable[[_Item], _Found], items: Sequence[_Item]) -> Generator[_Found]:
    """Like ``map``, with a few concurrent calls and no more ahead."""
    waiting: deque[Future[_Found]] = deque()
    with ThreadPoolExecutor(_AHEAD, "trt-eagle3-frame") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) == _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _checked(frames: Iterator[Frame], name: str, policy: MediaPolicy) -> Iterator[Frame]:
    """Check that all frames have one size and that the policy allows their pixels."""
    first: tuple[int, ...] | None = None
    num_pixels = 0
    for i, frame in enumerate(frames):
        first = first or frame.shape
        if frame.shape != first:
            raise UserError(
                f"{name}: frame {i} is {frame.shape[1]}x{frame.shape[0]}, frame 0 is "
                f"{first[1]}x{first[0]}. Resize all frames to one size."
            )
        num_pixels += frame.shape[0] * frame.shape[1]
        check_video_pixels(name, num_pixels, policy)
        yield frame


def _folder_frames(folder: Path, name: str) -> list[Path]:
    found = [path for path in folder.iterdir() if path.suffix.lower() in _FRAME_SUFFIXES]
    if not found:
        kinds = " ".join(sorted(_FRAME_SUFFIXES))
        raise UserError(f"{name}: no frames in this folder. Put image files there ({kinds}).")
    return sorted(found, key=_natural_key)


def _natural_key(path: Path) -> list[tuple[int, int, str]]:
    # sorts frame2 before frame10
    parts = re.split(r"(\d+)", path.name)
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts]


@contextmanager
def _open_file(
    video: Video, job: MediaJob, run: JobRunner, caller: Caller
) -> Iterator[VideoStream]:
    if video.timestamps is not None:
        raise UserError(f"{job.name}: a video file has its own times. Leave timestamps out.")
    source, data = video.frames, b""
    assert isinstance(source, str | Path | bytes)
    if job.policy.paths and not isinstance(source, bytes) and scheme(str(source)) in {"", "file"}:
        job = replace(job, path=str(source).removeprefix("file://"))
    else:
        data = read_media(source, job.name, job.policy, caller)
    with run(job, data) as parts:
        facts = next(parts).facts
        yield VideoStream(tuple(facts["times"]), _arrays(parts, job.name), facts["fps"])


def _arrays(parts: Iterator[MediaPart], name: str) -> Iterator[Frame]:
    empty = True
    for part in parts:
        assert part.array is not None
        empty = False
        yield part.array
    if empty:
        raise UserError(f"{name}: no frame could be decoded. Encode or download it again.")
