"""Qwen3.5 as ``transformers`` computes it."""

from __future__ import annotations

from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

from trt_eagle3.families.qwen3_vl.reference import Qwen3VLReference
from trt_eagle3.parity.reference.target import DecoderModules

__all__ = ["HYBRID", "Qwen35Reference"]

HYBRID = DecoderModules(
    layer=hf.Qwen3_5DecoderLayer,
    norm=hf.Qwen3_5RMSNorm,
    rope=hf.Qwen3_5TextRotaryEmbedding,
    apply_rope=hf.apply_rotary_pos_emb,
    axes=True,
    norm_offset=1.0,
)


class Qwen35Reference(Qwen3VLReference):
    """A Qwen3.5 target with its tower, which is Qwen3-VL's without visual levels."""

    modules = HYBRID
    tower = hf.Qwen3_5VisionModel
    whole = hf.Qwen3_5Model
