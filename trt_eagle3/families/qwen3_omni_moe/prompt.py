"""The prompts of Qwen3-Omni's thinker: one pad per visual token.

A video's time is in its positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from trt_eagle3.errors import UserError
from trt_eagle3.families.qwen3_omni_moe.reader import POSITIONS_PER_SECOND
from trt_eagle3.families.qwen3_omni_moe.rope_index import rope_index
from trt_eagle3.families.qwen3_vl.prompt import VIDEO_DEFAULTS, VisualRules
from trt_eagle3.multimodal.pixel_config import PixelConfigs, read_image_config, read_video_config
from trt_eagle3.multimodal.prompt_rules import Grid
from trt_eagle3.spec import TargetSpec

__all__ = ["ThinkerRules"]

_VIDEO_DEFAULTS: Mapping[str, Any] = {**VIDEO_DEFAULTS, "max_video_tokens": 128000}
"""Defaults of ``Qwen2VLVideoProcessor`` with the video sizes of ``Qwen3OmniMoeProcessor``."""


class ThinkerRules(VisualRules):
    """Implements ``multimodal.prompt_rules.PromptRules`` for a thinker."""

    def __init__(self, spec: TargetSpec, tokenizer: Tokenizer) -> None:
        """Read the texts of the visual tokens.

        Raises:
            UserError: the tokenizer lacks one of them.
        """
        super().__init__(spec, tokenizer)
        own: Any = spec.require_vision().own
        self._per_second: int = own[POSITIONS_PER_SECOND]

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
        """Compute positions by ``rope_index``.

        Raises:
            UserError: the patches of a video are not at whole positions.
        """
        steps = self._per_second * grid_seconds
        whole = steps.round()
        apart = (grid_thw[:, 0] > 1) & ((steps - whole).abs() > 1e-4)
        if bool(apart.any()):
            step = float(steps[apart][0])
            raise UserError(
                f"video: its patches are {step:.2f} rope positions apart ({self._per_second} per "
                "second), expected a whole number. Sample it at 1 or 2 frames a second."
            )
        merge = self._vision.spatial_merge_size
        return rope_index(visual_rows, grid_thw, whole.to(torch.int64), merge)
