"""A random Qwen3-Next of odd geometry, and drafts for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from tests.checkpoint.drafts import write_safeailab_draft, write_specforge_draft
from tests.families.qwen2.random_pair import TEMPLATE
from tests.families.random_pairs import save_target
from tests.multimodal.record_goldens import train_tokenizer

__all__ = ["DRAFTS", "GEOMETRIES", "save_qwen3_next"]

LINEAR, FULL = "linear_attention", "full_attention"
BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 7,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 28,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
    },
    "tie_word_embeddings": False,
}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "as published": {},
    "tied head, biases, a value head for each key head, no renormalising": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "norm_topk_prob": False,
    },
    "dense layers, every second layer attends, whole rope": {
        "mlp_only_layers": [0],
        "decoder_sparse_step": 2,
        "layer_types": [FULL, LINEAR, FULL, LINEAR],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1},
    },
}
DRAFTS: Mapping[str, Callable[..., Any]] = {
    "safeailab": write_safeailab_draft,
    "specforge": lambda folder, geometry: write_specforge_draft(folder, geometry, aux=[1, 3, 4]),
}


def save_qwen3_next(
    folder: Path, name: str = "as published", **changes: Any
) -> Qwen3NextForCausalLM:
    """Write the checkpoint of a geometry, its config with ``changes``, in float32."""
    tokenizer = train_tokenizer()
    values = {**BASE, "vocab_size": -(-len(tokenizer) // 8) * 8, **GEOMETRIES[name], **changes}
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**values)).eval()
    save_target(folder, model, tokenizer, {}, TEMPLATE)
    return model
