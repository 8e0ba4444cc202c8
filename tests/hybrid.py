"""Random Qwen3.5s as transformers saves them, and one that decodes with a random draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

from tests.reference.target import VISION

__all__ = ["TEXT", "save_qwen3_5", "save_qwen3_5_text"]

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
TOKENS = {
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}


def _randomised(model: nn.Module, seed: int) -> nn.Module:
    """States that last: with ``A_log`` and ``dt_bias`` around -2 a row keeps about 0.98 of them."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.3, generator=generator)
        if name.endswith(("A_log", "dt_bias")):
            parameter.data -= 2
    return model.eval().float()


def save_qwen3_5_text(folder: Path, *, seed: int = 0, **changes: Any) -> Qwen3_5ForCausalLM:
    model = _randomised(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TEXT | changes)), seed)
    model.save_pretrained(folder)
    return model


def save_qwen3_5(folder: Path, *, seed: int = 0, **changes: Any) -> Qwen3_5ForConditionalGeneration:
    text = TEXT | changes
    vision = {k: v for k, v in VISION.items() if k != "deepstack_visual_indexes"}
    config = Qwen3_5Config(
        text_config=text,
        vision_config=vision | {"out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=text["tie_word_embeddings"],
        **TOKENS,
    )
    model = _randomised(Qwen3_5ForConditionalGeneration(config), seed)
    model.save_pretrained(folder)
    return model
