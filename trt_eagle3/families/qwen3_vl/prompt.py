"""Qwen3-VL's prompts: one pad per visual token, each frame of a video after its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from trt_eagle3.errors import UserError
from trt_eagle3.families.qwen3_vl.rope_index import rope_index
from trt_eagle3.multimodal.pixel_config import (
    SHARED_DEFAULTS,
    PixelConfigs,
    read_image_config,
    read_video_config,
)
from trt_eagle3.multimodal.prompt_rules import Grid, MediaKind, token_text
from trt_eagle3.spec import TargetSpec

__all__ = ["VIDEO_DEFAULTS", "VisualRules"]

_HALF = (0.5, 0.5, 0.5)
VIDEO_DEFAULTS: Mapping[str, Any] = {
    **SHARED_DEFAULTS,
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    "patch_size": 16,
    "image_mean": _HALF,
    "image_std": _HALF,
    "fps": 2,
    "min_frames": 4,
    "max_frames": 768,
    "cap_pixels_per_frame": False,
    "max_video_tokens": 768,
}
"""Defaults of transformers' ``Qwen3VLVideoProcessor`` for keys that a file lacks."""


class VisualRules:
    """Implements ``multimodal.prompt_rules.PromptRules`` for a Qwen3-VL target."""

    text_content = False

    def __init__(self, spec: TargetSpec, tokenizer: Tokenizer) -> None:
        """Read the texts of the visual tokens.

        Raises:
            UserError: the tokenizer lacks one of them.
        """
        vision = spec.vision
        assert vision is not None, "a target without a tower"
        self._vision = vision
        image = token_text(tokenizer, vision.image_token_id, "image_token_id")
        video = token_text(tokenizer, vision.video_token_id, "video_token_id")
        self._start = _mark(tokenizer, vision.vision_start_token_id, "vision_start")
        self._end = _mark(tokenizer, vision.vision_end_token_id, "vision_end")
        self.pads: Mapping[MediaKind, str] = {"image": image, "video": video}
        self.control_tokens = (image, video, self._start, self._end)

    def pixels(self, directory: Path) -> PixelConfigs:
        """Read the files as ``Qwen2VLImageProcessor`` and ``Qwen3VLVideoProcessor`` do."""
        image = read_image_config(directory, self._vision)
        video = read_video_config(directory, self._vision, VIDEO_DEFAULTS, "max_frame_tokens")
        return PixelConfigs(image, video)

    def num_tokens(self, grid: Grid) -> int:
        """Count the merged patches."""
        t, h, w = grid
        return t * h * w // self._vision.spatial_merge_size**2

    def image_text(self, grid: Grid) -> str:
        """Return one pad per token."""
        return self.pads["image"] * self.num_tokens(grid)

    def video_text(self, grid: Grid, times: Sequence[float]) -> str:
        """Return each frame's time, and its pads between marks.

        The template's own marks stay around the video, as in transformers 5.10 and later. Older
        versions removed them.
        """
        pads = self.pads["video"] * (self.num_tokens(grid) // grid[0])
        frame = self._start + pads + self._end
        return "".join(f"<{second:.1f} seconds>{frame}" for second in times)

    def visual_rows(self, token_ids: Tensor) -> Tensor:
        """Return True at image and video pads."""
        vision = self._vision
        return (token_ids == vision.image_token_id) | (token_ids == vision.video_token_id)

    def positions(
        self, visual_rows: Tensor, grid_thw: Tensor, _seconds: Tensor
    ) -> tuple[Tensor, int]:
        """Compute positions by ``rope_index``: a frame's time is in the text before it."""
        return rope_index(visual_rows, grid_thw, self._vision.spatial_merge_size)


def _mark(tokenizer: Tokenizer, token_id: int | None, name: str) -> str:
    """Return the text of a token around images, by the config's id, else transformers' text.

    Raises:
        UserError: the tokenizer lacks the token.
    """
    if token_id is not None:
        return token_text(tokenizer, token_id, f"{name}_token_id")
    text = f"<|{name}|>"
    if tokenizer.token_to_id(text) is None:
        raise UserError(
            f"tokenizer: no token {text}, and config.json has no {name}_token_id. Copy the "
            "checkpoint's own tokenizer, or add the key."
        )
    return text
