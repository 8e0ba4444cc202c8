"""InternVL's prompts: an image's tokens between marks, each frame of a video after its number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from trt_eagle3.errors import UserError, quote
from trt_eagle3.families.internvl.tower import tiles_of
from trt_eagle3.multimodal.pixel_config import (
    CLIP_MEAN,
    CLIP_STD,
    IMAGE_FILES,
    SHARED_DEFAULTS,
    VIDEO_FILES,
    PixelConfig,
    PixelConfigs,
    channel_values,
    check_processor_values,
    find_processor_values,
    number_above_zero,
    size_of,
)
from trt_eagle3.multimodal.prompt_rules import Grid, MediaKind, token_text
from trt_eagle3.spec import TargetSpec

__all__ = ["InternVLRules"]

_START, _END, _VIDEO = "<img>", "</img>", "<video>"
_MOST_TILES = 1024  # or frames
_NUM_FRAMES = 8  # of a video if the config has no number: transformers' documented example
_DEFAULTS: Mapping[str, Any] = {
    **SHARED_DEFAULTS,
    "size": {"height": 384, "width": 384},
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "min_patches": 1,
    "max_patches": 12,
}
"""Defaults of transformers' ``GotOcr2ImageProcessor`` and ``InternVLVideoProcessor``."""


class InternVLRules:
    """Implements ``multimodal.prompt_rules.PromptRules`` for an InternVL target."""

    text_content = False

    def __init__(self, spec: TargetSpec, tokenizer: Tokenizer) -> None:
        """Find the tokens of images and of the marks around them.

        Raises:
            UserError: the tokenizer lacks one of them.
        """
        self._vision = vision = spec.require_vision()
        self._token = token_text(tokenizer, vision.image_token_id, "image_token_id")
        for token in (_START, _END, _VIDEO):
            if tokenizer.token_to_id(token) is None:
                raise UserError(
                    f"tokenizer: no token {token}, which InternVL's prompts are made of. The "
                    "tokenizer is another checkpoint's: copy this checkpoint's own."
                )
        self.pads: Mapping[MediaKind, str] = {"image": self._token, "video": _VIDEO}
        self.control_tokens = (self._token, _VIDEO, _START, _END)

    def pixels(self, directory: Path) -> PixelConfigs:
        """Read the configs. Images are always tiled, regardless of ``crop_to_patches``.

        ``InternVLProcessor`` requests tiles itself.
        """
        image = find_processor_values(directory, "image_processor", IMAGE_FILES)
        video = find_processor_values(directory, "video_processor", VIDEO_FILES)
        return PixelConfigs(self._config(*image, tiled=True), self._config(*video, tiled=False))

    def _config(self, path: Path, found: Mapping[str, Any], *, tiled: bool) -> PixelConfig:
        values, vision = {**_DEFAULTS, **found}, self._vision
        check_processor_values(path, values, {})
        side, size = tiles_of(vision).side * vision.patch_size, size_of(path, values)
        if (size.get("height"), size.get("width")) != (side, side):
            raise UserError(
                f"{path}: size: expected height and width {side} as in config.json, got "
                f"{quote(size, 80)}. The processor files belong to another checkpoint: copy this "
                "checkpoint's own."
            )

        def whole(key: str, default: int) -> int:
            value = int(number_above_zero(path, key, values.get(key) or default))
            if value > _MOST_TILES:
                raise UserError(
                    f"{path}: {key}: expected at most {_MOST_TILES}, got {value}. Copy the file "
                    "again."
                )
            return value

        return PixelConfig(
            patch_size=vision.patch_size,
            temporal_patch_size=1,
            merge_size=vision.spatial_merge_size,
            min_pixels=side**2,
            max_pixels=side**2,
            mean=channel_values(path, "image_mean", values["image_mean"], vision.in_channels),
            std=channel_values(path, "image_std", values["image_std"], vision.in_channels),
            rescale_factor=float(
                number_above_zero(path, "rescale_factor", values["rescale_factor"])
            ),
            resample=int(values["resample"]),
            fps=float(number_above_zero(path, "fps", values.get("fps") or 2.0)),
            tile_side=side,
            min_tiles=whole("min_patches", 1) if tiled else 1,
            max_tiles=whole("max_patches", 12) if tiled else 1,
            sampling="middles",
            num_frames=None if values.get("fps") else whole("num_frames", _NUM_FRAMES),
        )

    def num_tokens(self, grid: Grid) -> int:
        """Count the merged patches."""
        t, h, w = grid
        return t * h * w // self._vision.spatial_merge_size**2

    def image_text(self, grid: Grid) -> str:
        """Return the tokens of all tiles between one pair of marks."""
        return f"{_START}{self._token * self.num_tokens(grid)}{_END}"

    def video_text(self, grid: Grid, times: Sequence[float]) -> str:
        """Return one line per frame, numbered from 1."""
        frame = self.image_text((1, *grid[1:]))
        return "\n".join(f"Frame{i}: {frame}" for i in range(1, len(times) + 1))

    def visual_rows(self, token_ids: Tensor) -> Tensor:
        """Return True at image tokens."""
        return token_ids == self._vision.image_token_id

    def positions(
        self, visual_rows: Tensor, _grids: Tensor, _seconds: Tensor
    ) -> tuple[Tensor, int]:
        """Return 0, 1, 2, ... on each axis."""
        return torch.arange(len(visual_rows), dtype=torch.int32).repeat(3, 1), 0
