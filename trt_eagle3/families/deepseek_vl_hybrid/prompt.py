"""The images of DeepSeek-VL with two towers: a large square, and a smaller one made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trt_eagle3.families.deepseek_vl.prompt import (
    IMAGE_DEFAULTS,
    DeepseekVLRules,
    background,
    check_side,
    colours,
)
from trt_eagle3.families.deepseek_vl_hybrid.sam import sam_of
from trt_eagle3.multimodal.pixel_config import (
    CLIP_MEAN,
    CLIP_STD,
    DetailConfig,
    PixelConfig,
    check_processor_values,
    size_of,
)

__all__ = ["DeepseekVLHybridRules"]


class DeepseekVLHybridRules(DeepseekVLRules):
    """Implements ``multimodal.prompt_rules.PromptRules`` for a target with two towers."""

    defaults: Mapping[str, Any] = {
        **IMAGE_DEFAULTS,
        "high_res_size": {"height": 1024, "width": 1024},
        "high_res_resample": 3,
        "high_res_image_mean": CLIP_MEAN,
        "high_res_image_std": CLIP_STD,
    }
    """Those of transformers' ``DeepseekVLHybridImageProcessor``."""

    def _config(self, path: Path, values: Mapping[str, Any]) -> PixelConfig:
        small, sam = super()._config(path, values), sam_of(self._vision)
        size = size_of(path, {"size": values["high_res_size"]})
        check_side(path, "high_res_size", size, sam.image)
        check_processor_values(path, {**values, "resample": values["high_res_resample"]}, {})
        mean, std = (colours(path, f"high_res_image_{key}", values) for key in ("mean", "std"))
        pieces = self._vision.in_channels // 3 - 1
        detail = DetailConfig(
            sam.image, sam.patch, int(values["high_res_resample"]), background(mean)
        )
        # a colour's pieces of the larger square follow each other
        return replace(
            small,
            mean=(*small.mean, *(value for value in mean for _ in range(pieces))),
            std=(*small.std, *(value for value in std for _ in range(pieces))),
            detail=detail,
        )
