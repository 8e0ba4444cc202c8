"""Llama's decoder modules in ``transformers``."""

from __future__ import annotations

from transformers.models.llama import modeling_llama as hf

from trt_eagle3.parity.reference.target import DecoderModules

__all__ = ["DENSE"]

DENSE = DecoderModules(
    layer=hf.LlamaDecoderLayer,
    norm=hf.LlamaRMSNorm,
    rope=hf.LlamaRotaryEmbedding,
    apply_rope=hf.apply_rotary_pos_emb,
    axes=False,
)
