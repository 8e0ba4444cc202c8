"""Prepare Qwen2.5-VL prompts with ``transformers``.

They differ from Qwen3-VL's in the time of a video's patches, which is in the positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor

from trt_eagle3.families.qwen3_vl.processor_reference import Qwen3VLProcessorReference
from trt_eagle3.parity.reference.frames import FrameProcessor, Frames

__all__ = ["Qwen25ProcessorReference", "fits_frame"]


class _ImageTextProcessor(transformers.Qwen2_5_VLProcessor):  # type: ignore[misc]
    """A Qwen2_5_VLProcessor whose video processor is set later."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


class _VideoDefaults:
    """Defaults of ``Qwen2VLVideoProcessor``, whose import needs torchvision."""

    size: Mapping[str, int] = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}
    patch_size, temporal_patch_size, merge_size = 14, 2, 2
    image_mean = transformers.image_utils.OPENAI_CLIP_MEAN
    image_std = transformers.image_utils.OPENAI_CLIP_STD


class Qwen25ProcessorReference(Qwen3VLProcessorReference):
    """Implements ``parity.processor.ProcessorReference`` for a Qwen2.5-VL checkpoint."""

    _kind = _ImageTextProcessor

    @cached_property
    def _videos(self) -> FrameProcessor:
        return FrameProcessor(self._checkpoint, _VideoDefaults, fits_frame)

    def _metadata(self, video: Frames) -> Any:
        total = len(video.times)
        return transformers.video_utils.VideoMetadata(
            total_num_frames=total, fps=video.fps, frames_indices=list(range(total))
        )

    def _positions(
        self, token_ids: Tensor, grid_thw: Tensor, out: Mapping[str, Any]
    ) -> tuple[Tensor, int]:
        """Compute positions. Videos come after the images, as in the question's turn."""
        seconds = torch.zeros(len(grid_thw))
        times = out.get("second_per_grid_ts")
        if times is not None:
            seconds[len(grid_thw) - len(times) :] = torch.as_tensor(times)
        return self._target.rope_index(token_ids, grid_thw, seconds)


def fits_frame(processor: FrameProcessor, shape: Sequence[int]) -> bool:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    _, height, width, _ = shape
    size = smart_resize(
        height,
        width,
        factor=processor.factor,
        min_pixels=processor.size["shortest_edge"],
        max_pixels=processor.size["longest_edge"],
    )
    return tuple(size) == (height, width)
