"""DeepSeek-VL's prompts: an image is as many image tokens as the tower has patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from trt_eagle3.errors import UserError, quote
from trt_eagle3.families.deepseek_vl.tower import siglip_of
from trt_eagle3.multimodal.pixel_config import (
    CLIP_MEAN,
    CLIP_STD,
    IMAGE_FILES,
    SHARED_DEFAULTS,
    PixelConfig,
    PixelConfigs,
    channel_values,
    check_processor_values,
    find_processor_values,
    number_above_zero,
    size_of,
)
from trt_eagle3.multimodal.processor_files import read_processor_json
from trt_eagle3.multimodal.prompt_rules import Grid, MediaKind, token_text
from trt_eagle3.spec import TargetSpec, VisionSpec

__all__ = ["IMAGE_DEFAULTS", "DeepseekVLRules", "background", "check_side", "colours"]

_CHANNELS = 3
IMAGE_DEFAULTS: Mapping[str, Any] = {
    **SHARED_DEFAULTS,
    "size": {"height": 384, "width": 384},
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "min_size": 14,
    "do_pad": True,
}
"""Defaults of transformers' ``DeepseekVLImageProcessor``."""


class DeepseekVLRules:
    """Implements ``multimodal.prompt_rules.PromptRules`` for a DeepSeek-VL target."""

    text_content = False
    defaults = IMAGE_DEFAULTS

    def __init__(self, spec: TargetSpec, tokenizer: Tokenizer) -> None:
        """Find the token of images.

        Raises:
            UserError: the tokenizer lacks it.
        """
        self._vision = vision = spec.require_vision()
        self._token = token_text(tokenizer, vision.image_token_id, "image_token_id")
        self.pads: Mapping[MediaKind, str] = {"image": self._token}
        self.control_tokens = (self._token,)

    def pixels(self, directory: Path, /) -> PixelConfigs:
        """Read the config of images. There are no videos."""
        path, values = _image_values(directory, self._vision, self.defaults)
        config = self._config(path, values)
        return PixelConfigs(config, config)

    def _config(self, path: Path, values: Mapping[str, Any]) -> PixelConfig:
        """Build the config of ``values``, the checked content of ``path``."""
        vision = self._vision
        side = siglip_of(vision).side * vision.patch_size
        check_side(path, "size", size_of(path, values), side)
        least = int(number_above_zero(path, "min_size", values["min_size"]))
        if least > side:
            raise UserError(
                f"{path}: min_size: expected at most the size {side}, got {least}. Copy the file "
                "again."
            )
        mean = colours(path, "image_mean", values)
        return PixelConfig(
            patch_size=vision.patch_size,
            temporal_patch_size=1,
            merge_size=1,
            min_pixels=side**2,
            max_pixels=side**2,
            mean=mean,
            std=colours(path, "image_std", values),
            rescale_factor=float(
                number_above_zero(path, "rescale_factor", values["rescale_factor"])
            ),
            resample=int(values["resample"]),
            tile_side=side,
            background=background(mean),
            min_side=least,
        )

    def num_tokens(self, grid: Grid, /) -> int:
        """Count the patches, one token each."""
        t, h, w = grid
        return t * h * w

    def image_text(self, grid: Grid, /) -> str:
        """Return the tokens of an image."""
        return self._token * self.num_tokens(grid)

    def video_text(self, _grid: Grid, _times: Sequence[float], /) -> str:
        """Return an empty text: videos have no pad, so they are rejected earlier."""
        return ""

    def visual_rows(self, token_ids: Tensor) -> Tensor:
        """Return True at image tokens."""
        return token_ids == self._vision.image_token_id

    def positions(
        self, visual_rows: Tensor, _grids: Tensor, _seconds: Tensor, /
    ) -> tuple[Tensor, int]:
        """Return 0, 1, 2, ... on each axis."""
        return torch.arange(len(visual_rows), dtype=torch.int32).repeat(3, 1), 0


def _image_values(
    directory: Path, vision: VisionSpec, defaults: Mapping[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """Return the file of the image processor and its values, which fit the tower.

    Raises:
        UserError: there is no such file, it turns a step off, or it is another checkpoint's.
    """
    path, found = find_processor_values(directory, "image_processor", IMAGE_FILES)
    values = {**defaults, **found}
    check_processor_values(path, values, {})
    if values["do_pad"] is not True:
        raise UserError(
            f"{path}: do_pad: expected true, got {quote(values['do_pad'], 80)}. The vision tower "
            "takes squares: set it to true."
        )
    nested, tokens = directory / "processor_config.json", siglip_of(vision).num_patches
    told = read_processor_json(nested).get("num_image_tokens") if nested.exists() else None
    if told not in {None, tokens}:
        raise UserError(
            f"{nested}: num_image_tokens: expected {tokens} by image_size and patch_size of "
            f"config.json, got {quote(told, 80)}. Copy this checkpoint's own file."
        )
    return path, values


def check_side(path: Path, key: str, size: Mapping[str, Any], side: int) -> None:
    """Check that a size is the square of the tower."""
    if (size.get("height"), size.get("width")) != (side, side):
        raise UserError(
            f"{path}: {key}: expected height and width {side} as in config.json, got "
            f"{quote(dict(size), 80)}. The processor files belong to another checkpoint: copy this "
            "checkpoint's own."
        )


def colours(path: Path, key: str, values: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the numbers of red, green and blue at ``key``."""
    return channel_values(path, key, values[key], _CHANNELS)


def background(mean: tuple[float, ...]) -> tuple[int, ...]:
    """Return the colour of the borders that complete an image to a square."""
    return tuple(int(value * 255) for value in mean)
