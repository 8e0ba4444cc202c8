"""Qwen3 as ``transformers`` computes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.models.qwen3 import modeling_qwen3 as hf

from trt_eagle3.parity.reference.target import DecoderModules, TargetReference, VisionStates

__all__ = ["DENSE", "Qwen3Reference"]

DENSE = DecoderModules(
    layer=hf.Qwen3DecoderLayer,
    norm=hf.Qwen3RMSNorm,
    rope=hf.Qwen3RotaryEmbedding,
    apply_rope=hf.apply_rotary_pos_emb,
    axes=False,
)


class Qwen3Reference(TargetReference):
    """A Qwen3 target, dense or a mixture of experts."""

    num_visual_levels = 0

    def vision(
        self, _patches: Tensor, _grids: Tensor, _intermediates: Sequence[str] = (), /
    ) -> VisionStates:
        """Return empty states, since there is no tower."""
        none = torch.zeros(0, self.hidden_size)
        return VisionStates(none, none.expand(0, -1, -1), {})
