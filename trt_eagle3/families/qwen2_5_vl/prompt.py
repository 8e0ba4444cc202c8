"""Qwen2.5-VL's prompts: one pad per visual token. A video's time is in its positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from trt_eagle3.families.qwen2_5_vl.rope_index import rope_index
from trt_eagle3.families.qwen2_5_vl.tower import windows_of
from trt_eagle3.families.qwen3_vl.prompt import VisualRules
from trt_eagle3.multimodal.pixel_config import (
    CLIP_MEAN,
    CLIP_STD,
    SHARED_DEFAULTS,
    PixelConfigs,
    read_image_config,
    read_video_config,
)
from trt_eagle3.multimodal.prompt_rules import Grid
from trt_eagle3.spec import TargetSpec

__all__ = ["Qwen25Rules"]

_VIDEO_DEFAULTS: Mapping[str, Any] = {
    **SHARED_DEFAULTS,
    "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    "patch_size": 14,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "fps": 2,  # transformers uses every frame by default; qwen-vl-utils uses 2 fps
    "min_frames": 4,
    "max_frames": 768,
    "cap_pixels_per_frame": False,
    "max_video_tokens": 128000,
}
"""Defaults of transformers' ``Qwen2VLVideoProcessor`` for keys that a file lacks."""


class Qwen25Rules(VisualRules):
    """Implements ``multimodal.prompt_rules.PromptRules`` for a Qwen2.5-VL target."""

    def __init__(self, spec: TargetSpec, tokenizer: Tokenizer) -> None:
        """Read the texts of the visual tokens.

        Raises:
            UserError: the tokenizer lacks one of them.
        """
        super().__init__(spec, tokenizer)
        self._tokens_per_second = windows_of(spec.require_vision()).tokens_per_second

    def pixels(self, directory: Path) -> PixelConfigs:
        """Read the files as ``Qwen2VLImageProcessor`` and ``Qwen2VLVideoProcessor`` do."""
        image = read_image_config(directory, self._vision)
        video = read_video_config(directory, self._vision, _VIDEO_DEFAULTS, "max_video_tokens")
        return PixelConfigs(image, replace(video, sampling="steps"))

    def video_text(self, grid: Grid, _times: Sequence[float]) -> str:
        """Return one pad per token."""
        return self.pads["video"] * self.num_tokens(grid)

    def positions(
        self, visual_rows: Tensor, grid_thw: Tensor, grid_seconds: Tensor
    ) -> tuple[Tensor, int]:
        """Compute positions by ``rope_index``, in float32 as transformers does."""
        steps = self._tokens_per_second * grid_seconds
        return rope_index(visual_rows, grid_thw, steps, self._vision.spatial_merge_size)
