"""A random Qwen3-Omni of odd geometry as transformers writes it, and drafts for its thinker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeThinkerConfig,
)

from tests.families.qwen2_5_vl.random_pair import IMAGE_FILE, TEMPLATE, TOKENS, VIDEO_FILE
from tests.families.random_pairs import (
    NUM_LAYERS,
    save_draft,
    save_target,
    token_ids,
    tokenizer_with,
)

__all__ = ["save_omni", "save_omni_draft"]

TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "moe_intermediate_size": 20,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [2],
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [4, 2, 2],
        "interleaved": True,
    },
}
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 40,
    "intermediate_size": 36,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
AUDIO: dict[str, Any] = {
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 8,
    "d_model": 8,
    "num_mel_bins": 8,
    "n_window": 4,
    "downsample_hidden_size": 4,
}
AUDIO_TOKENS = {"audio_token_id": "<|audio_pad|>", "audio_start_token_id": "<|audio_start|>"}


def save_omni(folder: Path, **text: Any) -> Qwen3OmniMoeForConditionalGeneration:
    """Write a checkpoint without a talker."""
    tokenizer = tokenizer_with(*AUDIO_TOKENS.values())
    own = {**TEXT, "vocab_size": -(-len(tokenizer) // 8) * 8, **text}
    thinker = Qwen3OmniMoeThinkerConfig(
        text_config=own,
        vision_config={**VISION, "out_hidden_size": own["hidden_size"]},
        audio_config={**AUDIO, "output_dim": own["hidden_size"]},
        position_id_per_seconds=13,
        **token_ids(tokenizer, TOKENS | AUDIO_TOKENS),
    )
    config = Qwen3OmniMoeConfig(thinker_config=thinker.to_dict(), enable_audio_output=False)
    model = Qwen3OmniMoeForConditionalGeneration(config).eval()
    files = {"preprocessor_config.json": IMAGE_FILE, "video_preprocessor_config.json": VIDEO_FILE}
    save_target(folder, model, tokenizer, files, TEMPLATE, dtype=torch.float32)
    return model


def save_omni_draft(folder: Path, model: Any, producer: str = "specforge") -> Path:
    """A draft of the thinker."""
    text = model.config.thinker_config.text_config
    return save_draft(folder, producer, hidden=text.hidden_size, vocab=text.vocab_size)
