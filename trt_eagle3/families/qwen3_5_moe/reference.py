"""Qwen3.5-MoE as ``transformers`` computes it."""

from __future__ import annotations

from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as hf

from trt_eagle3.families.qwen3_vl.reference import Qwen3VLReference
from trt_eagle3.parity.reference.target import DecoderModules

__all__ = ["SPARSE", "Qwen35MoeReference"]

SPARSE = DecoderModules(
    layer=hf.Qwen3_5MoeDecoderLayer,
    norm=hf.Qwen3_5MoeRMSNorm,
    rope=hf.Qwen3_5MoeTextRotaryEmbedding,
    apply_rope=hf.apply_rotary_pos_emb,
    axes=True,
    norm_offset=1.0,
)


class Qwen35MoeReference(Qwen3VLReference):
    """A Qwen3.5-MoE target with its tower, which is Qwen3-VL's without visual levels."""

    modules = SPARSE
    tower = hf.Qwen3_5MoeVisionModel
    whole = hf.Qwen3_5MoeModel
