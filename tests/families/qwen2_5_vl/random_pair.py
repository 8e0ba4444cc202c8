"""A random Qwen2.5-VL of odd geometry, and drafts for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from tests.families.random_pairs import NUM_LAYERS, save_draft, save_target, token_ids
from tests.multimodal.record_goldens import train_tokenizer

__all__ = ["TEXT", "VISION", "save_qwen25", "save_qwen25_draft"]

SECTIONS = [2, 3, 3]
TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 40,
    "intermediate_size": 36,
    "num_heads": 2,
    "patch_size": 4,
    "window_size": 24,
    "fullatt_block_indexes": [1],
    "tokens_per_second": 3,
}
TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
IMAGE_FILE = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 256,
    "max_pixels": 3136,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
VIDEO_FILE = {
    **{key: IMAGE_FILE[key] for key in ("patch_size", "temporal_patch_size", "merge_size")},
    "video_processor_type": "Qwen2VLVideoProcessor",
    "size": {"shortest_edge": 256, "longest_edge": 6144},
}
TEMPLATE = """\
{%- set seen = namespace(images=0, videos=0) -%}
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
{%- set seen.images = seen.images + 1 -%}
{%- if add_vision_id -%}{{- 'Picture ' ~ seen.images ~ ': ' -}}{%- endif -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' or 'video' in part -%}
{%- set seen.videos = seen.videos + 1 -%}
{%- if add_vision_id -%}{{- 'Video ' ~ seen.videos ~ ': ' -}}{%- endif -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def save_qwen25(
    folder: Path,
    *,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    sections: list[int] | None = None,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Qwen2_5_VLForConditionalGeneration:
    """Write a checkpoint; ``text`` and ``vision`` differ from ``TEXT`` and ``VISION`` as said."""
    tokenizer = train_tokenizer()
    text = {**TEXT, "vocab_size": -(-len(tokenizer) // 8) * 8, **(text or {})}
    rope = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": sections or SECTIONS,
    }
    vision = {**VISION, **(vision or {}), "out_hidden_size": text["hidden_size"]}
    config = Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=tied,
        **token_ids(tokenizer, TOKENS),
    )
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    own = {"patch_size": vision["patch_size"]}
    files = {
        "preprocessor_config.json": {**IMAGE_FILE, **own},
        "video_preprocessor_config.json": {**VIDEO_FILE, **own},
    }
    save_target(folder, model, tokenizer, files, TEMPLATE, dtype=dtype)
    return model


def save_qwen25_draft(folder: Path, model: Any, producer: str = "specforge") -> Path:
    """A draft of ``model``; SpecForge trains its own with the target's sections in chunks."""
    text = model.config.text_config
    head_dim = text.hidden_size // text.num_attention_heads
    sections = text.rope_parameters["mrope_section"]
    rope = {"rope_type": "mrope", "mrope_section": sections} if producer == "specforge" else None
    return save_draft(
        folder,
        producer,
        hidden=text.hidden_size,
        vocab=text.vocab_size,
        head_dim=head_dim,
        rope=rope,
    )
