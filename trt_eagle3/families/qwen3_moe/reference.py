"""Qwen3-MoE's decoder modules in ``transformers``."""

from __future__ import annotations

from transformers.models.qwen3_moe import modeling_qwen3_moe as hf

from trt_eagle3.parity.reference.target import DecoderModules

__all__ = ["SPARSE"]

SPARSE = DecoderModules(
    layer=hf.Qwen3MoeDecoderLayer,
    norm=hf.Qwen3MoeRMSNorm,
    rope=hf.Qwen3MoeRotaryEmbedding,
    apply_rope=hf.apply_rotary_pos_emb,
    axes=False,
)
