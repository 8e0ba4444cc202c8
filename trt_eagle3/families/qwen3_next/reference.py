"""Qwen3-Next's decoder modules in ``transformers``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_next import modeling_qwen3_next as hf

from trt_eagle3.parity.reference.target import DecoderModules

__all__ = ["FUSED"]

_PARTS = ("qkv", "z", "b", "a")


def _layer(config: Any, index: int) -> nn.Module:
    """Create transformers' layer, with names for the parts of its fused projections.

    ``parity/reference/trace.py`` reads the outputs of modules. In a layer of linear attention,
    identities ``in_proj_qkv``, ``in_proj_z``, ``in_proj_b`` and ``in_proj_a`` output what
    transformers splits the projections into.
    """
    layer: Any = hf.Qwen3NextDecoderLayer(config, index)
    if hasattr(layer, "linear_attn"):
        _name_parts(layer.linear_attn)
    made: nn.Module = layer
    return made


def _name_parts(mixer: Any) -> None:
    split = mixer.fix_query_key_value_ordering
    for part in _PARTS:
        mixer.add_module(f"in_proj_{part}", nn.Identity())

    def named_split(mixed_qkvz: Tensor, mixed_ba: Tensor) -> tuple[Tensor, ...]:
        q, k, v, z, b, a = split(mixed_qkvz, mixed_ba)
        mixer.in_proj_qkv(torch.cat([part.flatten(2) for part in (q, k, v)], dim=-1))
        mixer.in_proj_z(z.flatten(2))
        mixer.in_proj_b(b)
        mixer.in_proj_a(a)
        return q, k, v, z, b, a

    mixer.fix_query_key_value_ordering = named_split


FUSED = DecoderModules(
    layer=_layer,
    norm=hf.Qwen3NextRMSNorm,
    rope=hf.Qwen3NextRotaryEmbedding,
    apply_rope=hf.apply_rotary_pos_emb,
    axes=False,
    norm_offset=1.0,
)
