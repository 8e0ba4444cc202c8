"""Qwen3-VL-MoE as ``transformers`` computes it."""

from __future__ import annotations

from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as hf

from trt_eagle3.families.qwen3_vl.reference import Qwen3VLReference
from trt_eagle3.parity.reference.target import DecoderModules

__all__ = ["Qwen3VLMoeReference"]


class Qwen3VLMoeReference(Qwen3VLReference):
    """A Qwen3-VL-MoE target."""

    modules = DecoderModules(
        layer=hf.Qwen3VLMoeTextDecoderLayer,
        norm=hf.Qwen3VLMoeTextRMSNorm,
        rope=hf.Qwen3VLMoeTextRotaryEmbedding,
        apply_rope=hf.apply_rotary_pos_emb,
        axes=True,
    )
    tower = hf.Qwen3VLMoeVisionModel
    whole = hf.Qwen3VLMoeModel
