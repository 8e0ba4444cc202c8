"""A random Qwen2 of odd geometry, as Qwen2.5 is published, and drafts for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.checkpoint.drafts import write_safeailab_draft, write_specforge_draft
from tests.families.random_pairs import save_target
from tests.multimodal.record_goldens import train_tokenizer

__all__ = ["DRAFTS", "GEOMETRIES", "save_qwen2"]

BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 7,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "own head": {},
    "seven heads to a key head, tied": {
        "hidden_size": 56,
        "num_attention_heads": 7,
        "tie_word_embeddings": True,
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
        }
    },
}
TEMPLATE = """\
{%- if messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""As Qwen2.5's: a system message of its own, and no BOS."""

DRAFTS: Mapping[str, Callable[..., Any]] = {
    "safeailab": write_safeailab_draft,
    "specforge": lambda folder, geometry: write_specforge_draft(folder, geometry, aux=[1, 3, 4]),
}


def save_qwen2(folder: Path, name: str = "own head", **changes: Any) -> Qwen2ForCausalLM:
    """Write the checkpoint of a geometry, its config with ``changes``, in float32."""
    tokenizer = train_tokenizer()
    values = {**BASE, "vocab_size": -(-len(tokenizer) // 8) * 8, **GEOMETRIES[name], **changes}
    model = Qwen2ForCausalLM(Qwen2Config(**values)).eval()
    save_target(folder, model, tokenizer, {}, TEMPLATE)
    return model
