"""Random Qwen3.5s as transformers saves them, dense and mixtures of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from tests.reference.target import VISION

__all__ = [
    "TEXT",
    "new_qwen3_5",
    "save_qwen3_5",
    "save_qwen3_5_moe",
    "save_qwen3_5_moe_text",
    "save_qwen3_5_text",
]

LINEAR, FULL = "linear_attention", "full_attention"
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
TEXT: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "rope_parameters": ROPE,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}
TOKENS = {
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}


def _randomised(model: nn.Module, seed: int) -> None:
    """States that last: with ``A_log`` and ``dt_bias`` around -2 a row keeps about 0.98 of them."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.3, generator=generator)
        if name.endswith(("A_log", "dt_bias")):
            parameter.data -= 2
    model.eval().float()


def _saved(folder: Path, model: PreTrainedModel, seed: int) -> Any:
    _randomised(model, seed)
    model.save_pretrained(folder)
    return model


def new_qwen3_5(
    text: dict[str, Any], tokens: dict[str, int], *, moe: bool, vision: dict[str, Any] | None = None
) -> PreTrainedModel:
    """A Qwen3.5 with a tower, in float32; ``text``: over ``EXPERTS`` where it has any.

    ``vision``: over those of the Qwen3-VL of other tests.
    """
    tower = {k: v for k, v in VISION.items() if k != "deepstack_visual_indexes"}
    of_config, of_model = (
        (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration)
        if moe
        else (Qwen3_5Config, Qwen3_5ForConditionalGeneration)
    )
    config = of_config(
        text_config=EXPERTS | text if moe else text,
        vision_config=tower | {"out_hidden_size": text["hidden_size"]} | (vision or {}),
        tie_word_embeddings=text.get("tie_word_embeddings", False),
        **tokens,
    )
    model: PreTrainedModel = of_model(config).eval().float()
    return model


def save_qwen3_5_text(folder: Path, *, seed: int = 0, **changes: Any) -> Qwen3_5ForCausalLM:
    return _saved(folder, Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TEXT | changes)), seed)


def save_qwen3_5_moe_text(folder: Path, *, seed: int = 0, **changes: Any) -> Qwen3_5MoeForCausalLM:
    config = Qwen3_5MoeTextConfig(**TEXT | EXPERTS | changes)
    return _saved(folder, Qwen3_5MoeForCausalLM(config), seed)


def save_qwen3_5(folder: Path, *, seed: int = 0, **changes: Any) -> Qwen3_5ForConditionalGeneration:
    return _saved(folder, new_qwen3_5(TEXT | changes, TOKENS, moe=False), seed)


def save_qwen3_5_moe(
    folder: Path, *, seed: int = 0, **changes: Any
) -> Qwen3_5MoeForConditionalGeneration:
    return _saved(folder, new_qwen3_5(TEXT | changes, TOKENS, moe=True), seed)
