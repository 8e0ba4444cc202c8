"""Prepare Qwen3-Omni prompts with ``transformers``: images and videos, no audio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor

from trt_eagle3.families.qwen2_5_vl.processor_reference import Qwen25ProcessorReference, fits_frame
from trt_eagle3.parity.reference.frames import FrameProcessor, Frames

__all__ = ["ThinkerProcessorReference"]

_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
}


class _ImageTextProcessor(transformers.Qwen3OmniMoeProcessor):  # type: ignore[misc]
    """A Qwen3OmniMoeProcessor without audio, whose video processor is set later."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: Any = None) -> None:
        transformers.ProcessorMixin.__init__(
            self, image_processor, tokenizer, chat_template=chat_template
        )
        for name, text in _TOKENS.items():
            setattr(self, name, text)
            setattr(self, f"{name}_id", tokenizer.convert_tokens_to_ids(text))


class _VideoDefaults:
    """Defaults of ``Qwen2VLVideoProcessor`` as ``Qwen3OmniMoeProcessor`` sets them."""

    size: Mapping[str, int] = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}
    patch_size, temporal_patch_size, merge_size = 16, 2, 2
    image_mean = image_std = (0.5, 0.5, 0.5)


class ThinkerProcessorReference(Qwen25ProcessorReference):
    """Implements ``parity.processor.ProcessorReference`` for a thinker."""

    _kind = _ImageTextProcessor

    @cached_property
    def _videos(self) -> FrameProcessor:
        return FrameProcessor(self._checkpoint, _VideoDefaults, fits_frame)

    def _options(self, videos: Sequence[Frames]) -> dict[str, Any]:
        """Pass the frame rate, from which the processor computes the seconds of a patch."""
        return {"fps": videos[0].fps} if videos else {}

    def _visual_rows(self, out: Mapping[str, Any]) -> Tensor:
        ids = out["input_ids"][0]
        config = self._target.config
        rows: Tensor = (ids == config.image_token_id) | (ids == config.video_token_id)
        return rows

    def _positions(
        self, token_ids: Tensor, grid_thw: Tensor, out: Mapping[str, Any]
    ) -> tuple[Tensor, int]:
        """Compute positions. Videos come after the images, as in the question's turn."""
        seconds = torch.zeros(len(grid_thw))
        times = out.get("video_second_per_grid")
        if times is not None:
            seconds[len(grid_thw) - len(times) :] = torch.as_tensor(times, dtype=torch.float32)
        return self._target.rope_index(token_ids, grid_thw, seconds)
