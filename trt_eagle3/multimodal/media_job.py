"""MediaJob: decode one image or video, in this process or in a decoder process.

Decoder processes import this module, so it does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trt_eagle3.multimodal.image import load_image
from trt_eagle3.multimodal.patches import Allocate, image_patches
from trt_eagle3.multimodal.pixel_config import PixelConfig
from trt_eagle3.multimodal.policy import MediaPolicy
from trt_eagle3.multimodal.video_file import FrameTimes, VideoFile

__all__ = ["JobRunner", "MediaJob", "MediaPart", "run_here", "run_job"]


@dataclass(frozen=True)
class MediaJob:
    """How to decode the encoded bytes of an image or video.

    Attributes:
        kind: ``image``: return the patches of an image. ``frame``: return an image unresized, as
            one frame of a video. ``video``: return the sampled frames of a video file.
        name: name of the image or video in errors.
        path: path of a video file, in place of its bytes.
        fps: frame rate of a video, in place of the one in its file.
        max_frames: use at most the first ``max_frames`` of a video's sampled frames.
    """

    kind: Literal["image", "frame", "video"]
    name: str
    policy: MediaPolicy
    config: PixelConfig
    path: str | None = None
    fps: float | None = None
    max_frames: int | None = None

    @property
    def timeout_s(self) -> float | None:
        """Time limit in seconds; None: no limit."""
        return self.policy.video_timeout_s if self.kind == "video" else self.policy.decode_timeout_s

    def to_dict(self) -> dict[str, Any]:
        """Convert to values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MediaJob:
        """Rebuild a job from the values of `to_dict`, before or after JSON."""
        policy, config = MediaPolicy(**values["policy"]), PixelConfig(**values["config"])
        return cls(**{**values, "policy": policy, "config": config})


@dataclass(frozen=True)
class MediaPart:
    """One part of a job's result.

    Attributes:
        facts: ``grid`` of an image's patches; or ``times`` and ``fps`` of a video's frames, sent
            before the first frame.
        array: uint8: patches [N, C, 1, patch * patch] of an image, or a frame [H, W, 3]; None for
            the part with ``times``.
    """

    facts: Mapping[str, Any]
    array: NDArray[np.uint8] | None = None


JobRunner = Callable[[MediaJob, bytes], AbstractContextManager[Iterator[MediaPart]]]
"""``run_here``, or ``DecoderPool.run`` in another process.

Leaving the context releases the job's resources, even if parts are unread.
"""


def run_here(job: MediaJob, data: bytes) -> AbstractContextManager[Iterator[MediaPart]]:
    """Run a job in this process; a `JobRunner`."""
    return closing(run_job(job, data))


def run_job(job: MediaJob, data: bytes, allocate: Allocate | None = None) -> Generator[MediaPart]:
    """Decode; yield one part for an image or frame, or ``times`` and then the frames of a video.

    A video file stays open until the generator is exhausted or closed.

    Args:
        data: encoded bytes; empty if the job has a path.
        allocate: creates the array of a part from its shape; None: numpy.
    Raises:
        UserError: the data cannot be decoded, or the policy excludes it.
        EnvironmentMissingError: PyAV is needed for a video file and is not installed.
    """
    allocate = allocate or _allocate
    if job.kind == "video":
        file = VideoFile(Path(job.path) if job.path else data, job.name, job.policy)
        with closing(file.sample(job.config, job.fps, job.max_frames)) as sampled:
            for found in sampled:
                yield (
                    MediaPart({"times": list(found.seconds), "fps": found.fps})
                    if isinstance(found, FrameTimes)
                    else MediaPart({}, _copy(found, allocate))
                )
        return
    image = load_image(data, job.name, job.policy)
    if job.kind == "frame":
        yield MediaPart({}, _copy(np.asarray(image), allocate))
        return
    pixels, grid = image_patches(image, job.config, job.name, job.policy, allocate)
    yield MediaPart({"grid": grid}, pixels)


def _allocate(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return np.empty(shape, dtype=np.uint8)


def _copy(pixels: NDArray[np.uint8], allocate: Allocate) -> NDArray[np.uint8]:
    out = allocate(pixels.shape)
    out[...] = pixels
    return out
