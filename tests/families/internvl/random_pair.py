"""Random InternVLs of odd geometry over each language model, and drafts for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import InternVLConfig, InternVLForConditionalGeneration

from tests.families.random_pairs import NUM_LAYERS, save_draft, save_target, tokenizer_with

__all__ = ["TEXT", "TEXTS", "VISION", "save_internvl", "save_internvl_draft"]

TEXT: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
TEXTS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "hidden_size": 56, "num_attention_heads": 7, "head_dim": None},
    "qwen3": {},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    },
}
"""Changes of ``TEXT`` for each language model. InternVL3.5-30B-A3B is the last."""
VISION: dict[str, Any] = {
    "hidden_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "attention_bias": True,
    "intermediate_size": 36,
    "image_size": [24, 24],
    "patch_size": [4, 4],
    "layer_norm_eps": 1e-6,
}
MARKS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
IMAGE_FILE = {
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "processor_class": "InternVLProcessor",
    "crop_to_patches": False,
    "min_patches": 1,
    "max_patches": 5,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<IMG_CONTEXT>\\n' -}}
{%- elif part.type == 'video' -%}{{- '<video>\\n' -}}
{%- elif part.type == 'text' -%}{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def internvl_tokenizer() -> Any:
    """A tokenizer that names InternVL's tokens as published ones do."""
    tokenizer = tokenizer_with(*MARKS.values())
    tokenizer._set_model_specific_special_tokens(special_tokens=MARKS)
    return tokenizer


def save_internvl(
    folder: Path,
    *,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    tied: bool = False,
    ratio: float = 0.5,
    dtype: torch.dtype = torch.float32,
    max_patches: int = 5,
) -> InternVLForConditionalGeneration:
    """Write a checkpoint; ``text`` and ``vision`` differ from ``TEXT`` and ``VISION`` as said."""
    tokenizer = internvl_tokenizer()
    text = {**TEXT, "vocab_size": -(-len(tokenizer) // 8) * 8, **(text or {})}
    text = {key: value for key, value in text.items() if value is not None}
    vision = {**VISION, **(vision or {})}
    side, patch = vision["image_size"][0], vision["patch_size"][0]
    tokens = round((side // patch * ratio) ** 2)
    config = InternVLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=tokens,
        downsample_ratio=ratio,
        tie_word_embeddings=tied,
    )
    model = InternVLForConditionalGeneration(config).eval()
    size = {"height": side, "width": side}
    files = {
        "preprocessor_config.json": {**IMAGE_FILE, "size": size, "max_patches": max_patches},
        "video_preprocessor_config.json": {
            "size": size,
            "image_mean": IMAGE_FILE["image_mean"],
            "image_std": IMAGE_FILE["image_std"],
            "video_processor_type": "InternVLVideoProcessor",
        },
        "processor_config.json": {
            "image_seq_length": tokens,
            "processor_class": "InternVLProcessor",
        },
    }
    save_target(folder, model, tokenizer, files, TEMPLATE, dtype=dtype)
    return model


def save_internvl_draft(folder: Path, model: Any, producer: str = "specforge") -> Path:
    """A draft of ``model``."""
    text = model.config.text_config
    return save_draft(
        folder,
        producer,
        hidden=text.hidden_size,
        vocab=text.vocab_size,
        head_dim=getattr(text, "head_dim", text.hidden_size // text.num_attention_heads),
    )
