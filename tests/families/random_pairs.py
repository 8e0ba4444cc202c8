"""Random pairs of the families that see, as transformers and a draft's producer write them.

The targets' weights are drawn so that activations stay near one; drafts accept nothing but by
chance, which is what equality of tokens with and without speculation needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.checkpoint.drafts import Geometry, write_specforge_draft, write_speculators_draft
from tests.multimodal.record_goldens import train_tokenizer
from tests.reference.checkpoint import random_tensor
from trt_eagle3.config import BuildConfig, config_from_dict

__all__ = ["DRAFTS", "config_of", "draw_weights", "save_draft", "save_target", "token_ids"]

DRAFTS: Mapping[str, Callable[..., Any]] = {
    "specforge": write_specforge_draft,
    "speculators": write_speculators_draft,
}
"""Producers whose layouts pairs are tried with."""

NUM_LAYERS = 5
AUX = {"specforge": [0, 1, 3], "speculators": [1, 2, 4]}
"""The same layers, as SpecForge counts them and as speculators counts them."""


def draw_weights(model: PreTrainedModel, seed: int = 0) -> None:
    """Weights of the size of a trained model's, in place."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        named = name.replace("lambda_", "layer_scale.weight_")
        drawn = random_tensor(named, tuple(parameter.shape), generator)
        parameter.data.copy_(0.5 * drawn if "lambda_" in name else drawn)
        if name.endswith(("A_log", "dt_bias")):
            parameter.data -= 2  # a row keeps about 0.98 of a gated delta rule's state


def save_target(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: Any,
    files: Mapping[str, Mapping[str, Any]],
    template: str,
    *,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """A checkpoint as ``save_pretrained`` writes it, with its tokenizer and processor files."""
    draw_weights(model)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    return folder


def token_ids(tokenizer: Any, names: Mapping[str, str]) -> dict[str, int]:
    """Config key -> id of the token that ``names`` gives for it."""
    return {key: tokenizer.convert_tokens_to_ids(name) for key, name in names.items()}


def tokenizer_with(*tokens: str) -> Any:
    """The goldens' tokenizer and further special tokens."""
    tokenizer = train_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    return tokenizer


def save_draft(
    folder: Path,
    producer: str,
    *,
    hidden: int,
    vocab: int,
    head_dim: int = 16,
    rope: dict[str, Any] | None = None,
    base: float = 1e6,
) -> Path:
    """A draft of a target of ``NUM_LAYERS`` layers, in the layout of ``producer``."""
    geometry = replace(
        Geometry(),
        hidden=hidden,
        target_hidden=hidden,
        head_dim=head_dim,
        vocab=vocab,
        draft_vocab=vocab // 2,
        target_layers=NUM_LAYERS,
        base=base,
    )
    options: dict[str, Any] = {} if rope is None else {"rope": rope}
    DRAFTS[producer](folder, geometry, aux=AUX[producer], **options)
    return folder


def config_of(target: Path, draft: Path | None, output: Path, **sections: Any) -> BuildConfig:
    """A build config of a pair."""
    raw: dict[str, Any] = {
        "name": "random",
        "target": {"checkpoint": str(target)},
        "draft": None if draft is None else {"checkpoint": str(draft)},
        "engine": {"prefill_chunk": 64},
        "limits": {"max_seq_len": 512, "max_visual_tokens": 256},
        "speculation": {"mode": "tree", "steps": 3, "topk": 3, "num_draft_tokens": 8},
        "output": str(output),
    }
    return config_from_dict({**raw, **sections}, "test")
