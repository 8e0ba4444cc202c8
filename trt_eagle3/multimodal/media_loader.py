"""MediaLoader: load one request's images and videos from their sources to patches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from threading import Event
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from trt_eagle3.multimodal.caller import Caller
from trt_eagle3.multimodal.decoder_pool import DecoderPool
from trt_eagle3.multimodal.fair_cache import FairCache
from trt_eagle3.multimodal.image import ImageSource, load_image, read_image
from trt_eagle3.multimodal.media_job import MediaJob, MediaPart, run_here
from trt_eagle3.multimodal.media_options import NO_MEDIA_OPTIONS, MediaOptions
from trt_eagle3.multimodal.patches import image_patches
from trt_eagle3.multimodal.pixel_config import PixelConfig
from trt_eagle3.multimodal.policy import MediaPolicy
from trt_eagle3.multimodal.prepared import PixelPatches, image_table
from trt_eagle3.multimodal.video import VideoSource, open_video
from trt_eagle3.multimodal.video_file import FrameTimes
from trt_eagle3.multimodal.video_patches import (
    CheckGrid,
    VideoEndedError,
    any_grid,
    video_patches,
)

__all__ = ["MediaLoader"]

_AT_ONCE = 4  # images and videos of one request loaded concurrently

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class MediaLoader:
    """Load the images and videos of one request.

    Attributes:
        decoders: processes that decode; None: this process decodes. This process always resizes and
            cuts Pillow images.
        caller: the request.
        check: as for `video_patches`.
        images: keeps the patches of encoded images; None: keep none.
    """

    image_config: PixelConfig
    video_config: PixelConfig
    policy: MediaPolicy
    decoders: DecoderPool | None
    caller: Caller
    check: CheckGrid = any_grid
    images: FairCache[PixelPatches] | None = None

    def image(
        self, source: ImageSource, name: str, options: MediaOptions = NO_MEDIA_OPTIONS
    ) -> PixelPatches:
        """Load the patches of one image.

        Raises:
            UserError: as for `load_image` and `image_patches`; or it takes too long.
            RequestCancelledError: the request was cancelled.
        """
        self.caller.check()
        config = options.of_image(self.image_config)
        if isinstance(source, Image.Image | np.ndarray):
            pixels, grid = image_patches(
                load_image(source, name, self.policy), config, name, self.policy
            )
            return self._still(pixels, grid)
        data = read_image(source, name, self.policy, self.caller)
        if self.images is None:
            return self._decoded(data, name, config)
        key, client = self._key(data, config), self.caller.client
        found = self.images.get(key, client)
        if found is None:
            found = self._decoded(data, name, config)
            self.images.put(key, found, found.pixels.nbytes, client)
        return found

    def _decoded(self, data: bytes, name: str, config: PixelConfig) -> PixelPatches:
        """Decode, resize and cut an encoded image."""
        with self._run(MediaJob("image", name, self.policy, config), data) as parts:
            [part] = parts
        assert part.array is not None
        return self._still(part.array, part.facts["grid"])

    def _key(self, data: bytes, config: PixelConfig) -> bytes:
        """Return a digest of all that the patches of an image depend on."""
        settings = repr((config, self.image_config, self.policy)).encode()
        return hashlib.sha256(hashlib.sha256(data).digest() + settings).digest()

    def video(
        self, source: VideoSource, name: str, options: MediaOptions = NO_MEDIA_OPTIONS
    ) -> tuple[PixelPatches, FrameTimes]:
        """Load the patches of one video and the times of its frames.

        Raises:
            UserError, EnvironmentMissingError: as for `open_video` and `video_patches`; or it takes
                too long.
            RequestCancelledError: the request was cancelled.
        """
        self.caller.check()
        try:
            return self._video(source, name, options, None)
        except VideoEndedError as ended:  # rare: a truncated file
            return self._video(source, name, options, ended.num_frames)

    def each(
        self, load: Callable[[MediaLoader, _Item], _Found], items: Sequence[_Item]
    ) -> Generator[_Found]:
        """Yield ``load(loader, item)`` of each item, a few concurrently.

        An item that fails cancels the others.
        """
        if len(items) < 2:
            yield from (load(self, item) for item in items)
            return
        over = Event()
        loader = replace(self, caller=self.caller.unless(over.is_set))
        with ThreadPoolExecutor(min(len(items), _AT_ONCE), "trt-eagle3-media") as pool:
            futures = [pool.submit(load, loader, item) for item in items]
            try:
                for future in futures:
                    yield future.result()
            finally:
                over.set()
                pool.shutdown(cancel_futures=True)

    def _video(
        self, source: VideoSource, name: str, options: MediaOptions, max_frames: int | None
    ) -> tuple[PixelPatches, FrameTimes]:
        config, policy = options.of_video(self.video_config), self.policy
        with open_video(
            source, config, name, policy, self._run, max_frames, self.caller, options
        ) as stream:
            patches = video_patches(
                stream.frames, len(stream.times), config, name, policy, self.check
            )
        return patches, FrameTimes(stream.times, stream.fps)

    def _still(self, pixels: NDArray[np.uint8], grid: Sequence[int]) -> PixelPatches:
        config = self.image_config
        t, h, w = grid
        return PixelPatches(
            torch.from_numpy(pixels), image_table(config), (t, h, w), config.temporal_patch_size
        )

    def _run(self, job: MediaJob, data: bytes) -> AbstractContextManager[Iterator[MediaPart]]:
        if self.decoders is None:
            return run_here(job, data)
        return self.decoders.run(job, data, self.caller)
