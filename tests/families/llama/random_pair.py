"""A random Llama of odd geometry, as Llama 3 and as SmolLM2 are published, and drafts for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import LlamaConfig, LlamaForCausalLM

from tests.checkpoint.drafts import write_safeailab_draft, write_speculators_draft
from tests.families.random_pairs import draw_weights
from tests.multimodal.record_goldens import train_tokenizer

__all__ = ["DRAFTS", "GEOMETRIES", "LLAMA3", "save_llama"]

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 7,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "Llama 3.1": {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    "Llama 3.2": {
        "rope_parameters": {**LLAMA3, "factor": 32.0, "rope_theta": 5e5},
        "tie_word_embeddings": True,
        "head_dim": 24,
    },
    # heads that are no power of two, a whole number of them to a key head
    "SmolLM2": {
        "hidden_size": 36,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        "tie_word_embeddings": True,
    },
    "biases": {"attention_bias": True},
}
MARKS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
)
TEMPLATE = """\
{{- bos_token -}}
{%- set system = 'Be helpful.' -%}
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content | trim -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' ~ system ~ '<|eot_id|>' -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' -}}
{{- message.content | trim ~ '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""
"""As Llama 3's: it writes BOS, and the tokenizer adds it to any text."""


def save_llama(folder: Path, name: str = "Llama 3.1", **changes: Any) -> LlamaForCausalLM:
    """Write the checkpoint of a geometry, its config with ``changes``, in float32."""
    tokenizer = _tokenizer()
    values = {**BASE, "vocab_size": -(-len(tokenizer) // 8) * 8, **GEOMETRIES[name], **changes}
    model = LlamaForCausalLM(LlamaConfig(**values, bos_token_id=None, eos_token_id=None)).eval()
    draw_weights(model)
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    ends = [tokenizer.convert_tokens_to_ids(mark) for mark in ("<|eot_id|>", "<|eom_id|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return model


def _tokenizer() -> Any:
    tokenizer = train_tokenizer()
    tokenizer.add_special_tokens(
        {
            "bos_token": MARKS[0],
            "eos_token": "<|eot_id|>",
            "additional_special_tokens": list(MARKS[1:]),
        }
    )
    bos = (MARKS[0], tokenizer.convert_tokens_to_ids(MARKS[0]))
    tokenizer.backend_tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single=f"{MARKS[0]} $A", pair=f"{MARKS[0]} $A {MARKS[0]} $B", special_tokens=[bos]
            ),
        ]
    )
    return tokenizer


DRAFTS: Mapping[str, Callable[..., Any]] = {
    "safeailab": write_safeailab_draft,
    "speculators": lambda folder, geometry: write_speculators_draft(
        folder, geometry, rope=LLAMA3, aux=[2, 3, 4]
    ),
}
"""Producers of the most published drafts of Llama-3.1-8B."""
