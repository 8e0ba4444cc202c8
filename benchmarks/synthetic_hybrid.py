"""Published geometries of Qwen3.5 (text alone) and Qwen3-Next, for checkpoints without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["HYBRID_SIZES", "HybridSize", "hybrid_class", "hybrid_config"]


@dataclass(frozen=True)
class HybridSize:
    """A target with full attention in every fourth layer, and linear attention in the rest.

    Attributes:
        key_heads, value_heads: of linear attention, ``delta_dim`` channels each.
        tied: whether the head is the token table.
        experts: config entries of a mixture, which is a Qwen3-Next; empty: a dense Qwen3.5.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    key_heads: int
    value_heads: int
    vocab: int = 248320
    head_dim: int = 256
    delta_dim: int = 128
    tied: bool = False
    experts: Mapping[str, int] = field(default_factory=dict)


def _mixture(experts: int, of_token: int, width: int) -> Mapping[str, int]:
    return {
        "num_experts": experts,
        "num_experts_per_tok": of_token,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
    }


HYBRID_SIZES: Mapping[str, HybridSize] = {
    "qwen3.5-0.8b": HybridSize(1024, 24, 8, 2, 3584, 16, 16, tied=True),
    "qwen3.5-9b": HybridSize(4096, 32, 16, 4, 12288, 16, 32),
    "qwen3.5-27b": HybridSize(5120, 64, 24, 4, 17408, 16, 48),
    "qwen3-next-80b": HybridSize(
        2048, 48, 16, 2, 5120, 16, 32, vocab=151936, experts=_mixture(512, 10, 512)
    ),
    "qwen3.5-tiny": HybridSize(128, 8, 2, 1, 128, 1, 2, vocab=65536, head_dim=128, delta_dim=32),
    "qwen3-next-tiny": HybridSize(
        *(128, 8, 2, 1, 128, 2, 4),
        vocab=65536,
        head_dim=128,
        delta_dim=32,
        experts=_mixture(8, 2, 32),
    ),
}
"""The tiny ones are not published; they are for trying a benchmark."""


def hybrid_config(size: str, num_layers: int | None) -> PretrainedConfig:
    """Return transformers' config of the model of ``size``."""
    from transformers import Qwen3_5TextConfig, Qwen3NextConfig

    s = HYBRID_SIZES[size]
    layers = num_layers or s.layers
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
    }
    if not s.experts:
        sections = [(s.head_dim // 8 + 2 - axis) // 3 for axis in range(3)]
        rope |= {"mrope_section": sections, "mrope_interleaved": True}
    return (Qwen3NextConfig if s.experts else Qwen3_5TextConfig)(
        **s.experts,
        vocab_size=s.vocab,
        hidden_size=s.hidden,
        intermediate_size=s.inner,
        num_hidden_layers=layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        linear_num_key_heads=s.key_heads,
        linear_num_value_heads=s.value_heads,
        linear_key_head_dim=s.delta_dim,
        linear_value_head_dim=s.delta_dim,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention" if i % 4 < 3 else "full_attention" for i in range(layers)],
        rope_parameters=rope,
        max_position_embeddings=262144,
        tie_word_embeddings=s.tied,
    )


def hybrid_class(size: str) -> type[PreTrainedModel]:
    """Return transformers' class of the model of ``size``."""
    from transformers import Qwen3_5ForCausalLM, Qwen3NextForCausalLM

    found: type[PreTrainedModel] = (
        Qwen3NextForCausalLM if HYBRID_SIZES[size].experts else Qwen3_5ForCausalLM
    )
    return found
