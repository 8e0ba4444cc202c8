"""Qwen3.5 as ``transformers`` computes it."""

from __future__ import annotations

from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

from trt_eagle3.families.qwen3.reference import Qwen3Reference
from trt_eagle3.families.qwen3_vl.reference import Qwen3VLReference
from trt_eagle3.parity.reference.target import DecoderModules

__all__ = ["Qwen35Reference", "Qwen35TextReference"]

_MODULES = DecoderModules(
    layer=hf.Qwen3_5DecoderLayer,
    norm=hf.Qwen3_5RMSNorm,
    rope=hf.Qwen3_5TextRotaryEmbedding,
    apply_rope=hf.apply_rotary_pos_emb,
    axes=True,
    norm_offset=1.0,
)


class Qwen35Reference(Qwen3VLReference):
    """A Qwen3.5 with its tower, which is Qwen3-VL's without visual levels."""

    modules = _MODULES
    tower = hf.Qwen3_5VisionModel
    model = hf.Qwen3_5Model


class Qwen35TextReference(Qwen3Reference):
    """A Qwen3.5 that reads text only."""

    modules = _MODULES
