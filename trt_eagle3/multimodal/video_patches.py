"""Convert frames of a video to uint8 patches, one temporal patch at a time.

The result equals ``Qwen3VLVideoProcessor`` element for element. That processor needs torchvision.
Its resize of uint8 frames on the CPU is ``torch.nn.functional.interpolate`` with antialias, which
this module calls.

Memory: ``t * h * w * patch^2 * temporal_patch * 3`` bytes for the patches, and ``temporal_patch``
frames at their own size. The frames of a video are never all in memory.
"""

# Shapes: N patches, C channels, T frames of a patch, H and W pixels of a frame, (t, h, w) the grid
# of patches

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.fit import check_resized, fit_video
from trt_eagle3.multimodal.patches import cut_plane, merge_blocks
from trt_eagle3.multimodal.pixel_config import PixelConfig
from trt_eagle3.multimodal.policy import LOCAL_MEDIA, MediaPolicy
from trt_eagle3.multimodal.prepared import PixelPatches, video_table

__all__ = ["CheckGrid", "VideoEndedError", "any_grid", "video_patches"]

_TORCH_FILTERS = {2: "bilinear", 3: "bicubic"}

Frame = NDArray[np.uint8]
CheckGrid = Callable[[str, tuple[int, int, int]], None]
"""Check the name of a video in errors, and its grid of patches."""


def any_grid(_name: str, _grid: tuple[int, int, int]) -> None:
    """Accept every grid (a `CheckGrid`)."""


class VideoEndedError(Exception):
    """A video has fewer frames than stated. Their true number determines the size of each."""

    def __init__(self, num_frames: int) -> None:
        super().__init__(f"{num_frames} frames")
        self.num_frames = num_frames


def video_patches(
    frames: Iterable[Frame],
    num_frames: int,
    config: PixelConfig,
    name: str = "video",
    policy: MediaPolicy = LOCAL_MEDIA,
    check: CheckGrid = any_grid,
) -> PixelPatches:
    """Resize and cut frames as they arrive. Repeat the last one to fill the last temporal patch.

    Args:
        frames: ``num_frames`` arrays, uint8 [H, W, 3], all of one size. At most
            ``temporal_patch_size`` are held.
        policy: also bounds the frames after resizing.
        check: raises if the grid has too many patches, before they are allocated.
    Raises:
        UserError: there are too few frames, the aspect ratio is extreme, the policy excludes the
            size, or torch lacks the filter.
        VideoEndedError: there are fewer than ``num_frames``.
    """
    builder: _Builder | None = None
    group: list[Frame] = []
    count = 0
    for count, frame in enumerate(frames, start=1):
        if builder is None:
            builder = _Builder(num_frames, frame.shape, config, name, policy, check)
        group.append(frame)
        if len(group) == config.temporal_patch_size or count == num_frames:
            builder.add(group)
            group = []
    if builder is None or count < num_frames:
        raise VideoEndedError(count)
    return builder.patches()


class _Builder:
    def __init__(
        self,
        num_frames: int,
        shape: Sequence[int],
        config: PixelConfig,
        name: str,
        policy: MediaPolicy,
        check: CheckGrid,
    ) -> None:
        self._shape, self._config, self._name = tuple(shape), config, name
        self._size = fit_video(name, num_frames, shape[0], shape[1], config)
        check_resized(name, self._size, policy, num_frames)
        self._mode = _TORCH_FILTERS.get(config.resample)
        if self._mode is None and self._size != self._shape[:2]:
            raise UserError(
                f"{name}: resample: expected 2 or 3, got {config.resample}. Correct the video "
                "processor config."
            )
        patch, temporal = config.patch_size, config.temporal_patch_size
        self._grid = -(-num_frames // temporal), self._size[0] // patch, self._size[1] // patch
        check(name, self._grid)
        self._pixels = torch.empty(
            self._grid[0], self._grid[1] * self._grid[2], 3, temporal, patch**2, dtype=torch.uint8
        )
        self._num_added = 0

    def add(self, group: list[Frame]) -> None:
        """Cut the frames of one temporal patch."""
        planes = self._resize(np.stack(group)).numpy()
        pixels = self._pixels[self._num_added].numpy()
        blocks = merge_blocks(pixels, (1, *self._grid[1:]), self._config)[0]
        for frame in range(self._config.temporal_patch_size):
            for channel in range(3):
                plane = planes[min(frame, len(group) - 1), channel]
                cut_plane(plane, blocks[..., channel, frame, :], self._config)
        self._num_added += 1

    def _resize(self, frames: NDArray[np.uint8]) -> torch.Tensor:
        """Resize uint8 [F, H, W, 3] to [F, 3, height, width]."""
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2)
        if self._size != self._shape[:2]:
            # this memory layout is twice as fast, with the same result
            pixels = torch.nn.functional.interpolate(
                pixels, size=self._size, mode=str(self._mode), align_corners=False, antialias=True
            )
        return pixels.contiguous()

    def patches(self) -> PixelPatches:
        config = self._config
        return PixelPatches(
            self._pixels.flatten(0, 1), video_table(config), self._grid, config.temporal_patch_size
        )
