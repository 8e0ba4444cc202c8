"""Frames of a video through transformers' image processor: its video processors need torchvision.

Frames that need no resizing are processed one by one, which computes the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

__all__ = ["FrameProcessor", "Frames"]


@dataclass(frozen=True)
class Frames:
    """uint8 [F, H, W, 3], the time of each frame in seconds, and the frames per second."""

    pixels: Tensor
    times: Sequence[float]
    fps: float


class FrameProcessor:
    """Replaces one of transformers' video processors: frames go through the image processor in
    pairs, without resizing.
    """

    def __init__(
        self,
        checkpoint: Path,
        defaults: Any,
        fits: Callable[[FrameProcessor, Sequence[int]], bool],
    ) -> None:
        """Read the files that the video processor would read.

        Args:
            defaults: an object with its class's attributes.
            fits: whether the video processor would keep frames of a shape [F, H, W, 3] at their
                size.
        """
        from transformers.video_processing_utils import BaseVideoProcessor

        stored, _ = BaseVideoProcessor.get_video_processor_dict(
            str(checkpoint), local_files_only=True
        )
        names = (
            "size",
            "patch_size",
            "temporal_patch_size",
            "merge_size",
            "image_mean",
            "image_std",
            "rescale_factor",
        )
        values = {name: stored.get(name, getattr(defaults, name, None)) for name in names}
        self.size: dict[str, int] = dict(values.pop("size"))
        for old, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            self.size[edge] = stored.get(old) or self.size[edge]
        known = {name: value for name, value in values.items() if value is not None}
        self._images = transformers.Qwen2VLImageProcessorPil(do_resize=False, **known)
        self._fits = fits
        self.merge_size: int = self._images.merge_size
        self.temporal_patch_size: int = self._images.temporal_patch_size
        self.factor: int = self._images.patch_size * self.merge_size

    def fits(self, video: Frames) -> bool:
        """Return whether transformers would keep the frames at their size."""
        return self._fits(self, video.pixels.shape)

    def __call__(
        self, videos: Sequence[Any], video_metadata: Sequence[Any], **_: Any
    ) -> dict[str, Any]:
        found = [self._patches(torch.as_tensor(video)) for video in videos]
        return {
            "pixel_values_videos": torch.cat([patches for patches, _ in found]),
            "video_grid_thw": torch.tensor([grid for _, grid in found]),
            "video_metadata": list(video_metadata),
        }

    def _patches(self, video: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """Return patches of frames joined over time.

        Each half of a temporal patch comes from the still of its own frame.
        """
        frames = list(video)
        temporal, patch = self.temporal_patch_size, self._images.patch_size
        frames += frames[-1:] * (-len(frames) % temporal)
        stills = [self._images(images=[frame.numpy()], return_tensors="pt") for frame in frames]
        _, height, width = stills[0]["image_grid_thw"][0].tolist()
        cut = [
            still["pixel_values"].view(height * width, 3, temporal, patch * patch)
            for still in stills
        ]
        joined = [
            torch.stack([cut[start + i][:, :, i] for i in range(temporal)], dim=2)
            for start in range(0, len(cut), temporal)
        ]
        return torch.cat(joined).flatten(1), (len(joined), height, width)
