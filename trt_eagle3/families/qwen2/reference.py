"""Qwen2's decoder modules in ``transformers``."""

from __future__ import annotations

from transformers.models.qwen2 import modeling_qwen2 as hf

from trt_eagle3.parity.reference.target import DecoderModules

__all__ = ["DENSE"]

DENSE = DecoderModules(
    layer=hf.Qwen2DecoderLayer,
    norm=hf.Qwen2RMSNorm,
    rope=hf.Qwen2RotaryEmbedding,
    apply_rope=hf.apply_rotary_pos_emb,
    axes=False,
)
