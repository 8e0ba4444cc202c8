"""Published geometries of Qwen2.5-VL and InternVL3.5, for checkpoints without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["FAMILY_SIZES", "FamilySize", "family_config"]

_VOCAB = 152064


@dataclass(frozen=True)
class FamilySize:
    """A decoder, and the tower before it.

    Attributes:
        tower_layers, tower_hidden, tower_heads, tower_inner: of the tower.
        internvl: whether it is an InternVL3.5, otherwise a Qwen2.5-VL.
        large_tower: whether InternViT has RMSNorms, and norms of q and k.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    tower_layers: int
    tower_hidden: int
    tower_heads: int
    tower_inner: int
    internvl: bool = False
    large_tower: bool = False


FAMILY_SIZES: Mapping[str, FamilySize] = {
    "qwen2.5-vl-7b": FamilySize(3584, 28, 28, 4, 18944, 32, 1280, 16, 3420),
    "internvl3.5-8b": FamilySize(4096, 36, 32, 8, 12288, 24, 1024, 16, 4096, internvl=True),
    "internvl3.5-38b": FamilySize(
        *(5120, 64, 64, 8, 25600, 45, 3200, 25, 12800), internvl=True, large_tower=True
    ),
}
"""InternViT's heads have 64 channels in the 8B model, and 128 in the 38B one."""


def family_config(size: str, num_layers: int | None) -> tuple[PretrainedConfig, Any]:
    """Return transformers' config and class of the model of ``size``."""
    s = FAMILY_SIZES[size]
    text = {
        "vocab_size": _VOCAB,
        "hidden_size": s.hidden,
        "intermediate_size": s.inner,
        "num_hidden_layers": num_layers or s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "max_position_embeddings": 32768,
        "eos_token_id": 151645,
    }
    return _internvl(s, text) if s.internvl else _qwen2_5_vl(s, text)


def _qwen2_5_vl(s: FamilySize, text: dict[str, Any]) -> tuple[PretrainedConfig, Any]:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    config = Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={
            "depth": s.tower_layers,
            "hidden_size": s.tower_hidden,
            "intermediate_size": s.tower_inner,
            "num_heads": s.tower_heads,
            "out_hidden_size": s.hidden,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
        },
        tie_word_embeddings=False,
    )
    return config, Qwen2_5_VLForConditionalGeneration


def _internvl(s: FamilySize, text: dict[str, Any]) -> tuple[PretrainedConfig, Any]:
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = InternVLConfig(
        text_config={**text, "model_type": "qwen3", "head_dim": 128, "rope_parameters": rope},
        vision_config={
            "hidden_size": s.tower_hidden,
            "num_hidden_layers": s.tower_layers,
            "num_attention_heads": s.tower_heads,
            "intermediate_size": s.tower_inner,
            "attention_bias": not s.large_tower,
            "use_qk_norm": s.large_tower,
            "norm_type": "rms_norm" if s.large_tower else "layer_norm",
            "image_size": [448, 448],
            "patch_size": [14, 14],
        },
        image_token_id=151671,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )
    return config, InternVLForConditionalGeneration
