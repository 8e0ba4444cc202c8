"""Random DeepSeek-VLs of odd geometry, with one tower and with two, and drafts for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import (
    DeepseekVLConfig,
    DeepseekVLForConditionalGeneration,
    DeepseekVLHybridConfig,
    DeepseekVLHybridForConditionalGeneration,
    PreTrainedModel,
)

from tests.families.random_pairs import NUM_LAYERS, save_draft, save_target, tokenizer_with

__all__ = [
    "FAMILIES",
    "HYBRID",
    "SAM",
    "SIGLIP",
    "TEMPLATE",
    "TEXT",
    "save_deepseek",
    "save_deepseek_draft",
]

PLAIN, HYBRID = "deepseek_vl", "deepseek_vl_hybrid"
FAMILIES = {
    PLAIN: DeepseekVLForConditionalGeneration,
    HYBRID: DeepseekVLHybridForConditionalGeneration,
}
TEXT: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
}
SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 36,
    "image_size": 24,
    "patch_size": 4,
    "vision_use_head": False,
}
SAM: dict[str, Any] = {
    "model_type": "sam_vision_model",
    "hidden_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "mlp_dim": 44,
    "output_channels": 20,
    "image_size": 40,
    "patch_size": 5,
    "window_size": 3,
    "global_attn_indexes": [1, 3],
}
"""Windows of 3 do not divide the 8 patches of a side."""
BOS, IMAGE = "<|begin_of_sentence|>", "<image_placeholder>"
TEMPLATE = """\
{%- set ends = ['\\n\\n', '<|im_end|>'] -%}
{{- 'You are helpful.\\n\\n' -}}
{%- for message in messages -%}
{{- message['role'].capitalize() ~ ': ' -}}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- '<image_placeholder>' -}}
{%- elif part['type'] == 'text' -%}{{- part['text'] | trim -}}
{%- endif -%}
{%- endfor -%}
{{- ends[0] if message['role'] == 'user' else ends[1] -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}
"""
"""As DeepSeek-VL's: it takes parts alone and writes no BOS, which the tokenizer adds."""
MEANS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
DETAIL_MEANS = {
    "high_res_image_mean": [0.48, 0.46, 0.41],
    "high_res_image_std": [0.27, 0.26, 0.28],
}


def deepseek_tokenizer() -> Any:
    """A tokenizer that adds BOS to every text, and names the token of images."""
    tokenizer = tokenizer_with(IMAGE)
    tokenizer.add_special_tokens({"bos_token": BOS})
    tokenizer._set_model_specific_special_tokens(special_tokens={"image_token": IMAGE})
    bos = (BOS, tokenizer.convert_tokens_to_ids(BOS))
    tokenizer.backend_tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[bos]
            ),
        ]
    )
    return tokenizer


def save_deepseek(
    folder: Path,
    family: str = PLAIN,
    *,
    text: dict[str, Any] | None = None,
    siglip: dict[str, Any] | None = None,
    sam: dict[str, Any] | None = None,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Write a checkpoint; the sections differ from ``TEXT``, ``SIGLIP`` and ``SAM`` as given."""
    tokenizer = deepseek_tokenizer()
    text = {**TEXT, "vocab_size": -(-len(tokenizer) // 8) * 8, **(text or {})}
    siglip, sam = {**SIGLIP, **(siglip or {})}, {**SAM, **(sam or {})}
    sections: dict[str, Any] = {
        "text_config": text,
        "vision_config": siglip,
        "image_token_id": tokenizer.convert_tokens_to_ids(IMAGE),
        "tie_word_embeddings": tied,
    }
    side = siglip["image_size"]
    image: dict[str, Any] = {"size": {"height": side, "width": side}, "min_size": 5, **MEANS}
    if family == HYBRID:
        large = {"height": sam["image_size"], "width": sam["image_size"]}
        image |= {"high_res_size": large, **DETAIL_MEANS}
        config: Any = DeepseekVLHybridConfig(high_res_vision_config=sam, **sections)
    else:
        config = DeepseekVLConfig(**sections)
    tokens = (side // siglip["patch_size"]) ** 2
    files = {
        "preprocessor_config.json": image,
        "processor_config.json": {"num_image_tokens": tokens},
    }
    model = FAMILIES[family](config).eval()
    save_target(folder, model, tokenizer, files, TEMPLATE, dtype=dtype)
    return model


def save_deepseek_draft(folder: Path, model: Any, producer: str = "specforge") -> Path:
    """A draft of ``model``."""
    text = model.config.text_config
    return save_draft(folder, producer, hidden=text.hidden_size, vocab=text.vocab_size, base=1e4)
