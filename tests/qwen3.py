"""A trained text-only pair: the decoder of the tiny Qwen3-VL under Qwen3's names, and its draft.

At equal positions on all three axes Qwen3-VL's rope is Qwen3's, so on text the two targets compute
the same, and the draft accepts as much.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.tiny import DRAFT, TARGET, build_tiny

__all__ = ["CHAT_TEMPLATE", "build_qwen3", "save_qwen3", "save_qwen3_draft"]

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content is string -%}{%- set content = message.content -%}
{%- else -%}{%- set content = '' -%}{%- endif -%}
{%- if message.role == 'assistant' and '</think>' in content -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""As Qwen3's: content that is no text is left out, and so is what was thought before."""

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
_LANGUAGE = "model.language_model."


def save_qwen3(folder: Path, **changes: Any) -> Path:
    """The tiny target's decoder as a Qwen3 checkpoint, its config with ``changes``."""
    folder.mkdir(parents=True)
    theirs = json.loads((TARGET / "config.json").read_text())
    text = dict(theirs["text_config"])
    theta = {"rope_theta": text["rope_theta"], "rope_scaling": None}
    own = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "use_sliding_window": False,
    }
    config = text | own | theta | {"tie_word_embeddings": False} | changes
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name.replace(_LANGUAGE, "model."): tensor
        for name, tensor in load_file(TARGET / "model.safetensors").items()
        if name.startswith((_LANGUAGE, "lm_head."))
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name in _TOKENIZER:
        shutil.copy(TARGET / name, folder / name)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def save_qwen3_draft(folder: Path) -> Path:
    """The tiny draft as one of a Qwen3."""
    shutil.copytree(DRAFT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"target_model_type": "qwen3"}))
    return folder


def build_qwen3(folder: Path, **sections: Any) -> Path:
    """Build the pair under ``folder``; returns the bundle."""
    target, draft = save_qwen3(folder / "target"), save_qwen3_draft(folder / "draft")
    return build_tiny(folder / "engines", target=target, draft=draft, **sections)
