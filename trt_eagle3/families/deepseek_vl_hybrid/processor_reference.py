"""Prepare prompts of DeepSeek-VL with two towers with ``transformers``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from trt_eagle3.families.deepseek_vl.processor_reference import (
    DeepseekVLProcessorReference,
    patches_of,
)
from trt_eagle3.multimodal.squares import num_pieces

__all__ = ["DeepseekVLHybridProcessorReference"]


class DeepseekVLHybridProcessorReference(DeepseekVLProcessorReference):
    """Implements ``parity.processor.ProcessorReference`` for a target with two towers."""

    processor_type = transformers.DeepseekVLHybridProcessor
    image_type = transformers.DeepseekVLHybridImageProcessorPil

    def patches(self, out: Any) -> Tensor:
        """Return the patches [n, D] of the processor's output, as ``multimodal/squares.py``."""
        config = self._target.config
        small, large = config.vision_config, config.high_res_vision_config
        own = patches_of(out["pixel_values"], small.patch_size)
        count, area = (small.image_size // small.patch_size) ** 2, small.patch_size**2
        pieces = num_pieces(small.image_size, large.image_size)
        detail = patches_of(out["high_res_pixel_values"], large.patch_size)
        planes = detail.view(-1, large.image_size**2 // large.patch_size**2, 3, large.patch_size**2)
        planes = planes.transpose(1, 2).flatten(2)
        filled = self._zero_bytes()[None, :, None].repeat(len(planes), 1, count * pieces * area)
        filled[..., : planes.shape[2]] = planes
        by_token = filled.view(-1, 3, count, pieces * area).transpose(1, 2)
        return torch.cat([own, by_token.reshape(len(own), -1)], dim=1)

    def _zero_bytes(self) -> Tensor:
        """Return what the image processor makes of a zero of each colour in the larger square."""
        images = self._processor.image_processor
        black = images.rescale(np.zeros((3, 1, 1), dtype=np.uint8), images.rescale_factor)
        mean, std = images.high_res_image_mean, images.high_res_image_std
        return torch.as_tensor(images.normalize(black, mean, std)).flatten()
