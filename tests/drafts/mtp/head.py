"""Random MTP heads in checkpoints of random Qwen3.5s and Qwen3-Nexts, and what transformers' own
layers make of them.

Shapes: T rows, H hidden, V vocab.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe
from transformers.models.qwen3_next import modeling_qwen3_next as fused

from tests.reference.checkpoint import random_tensor
from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.drafts.mtp.manifest import MtpManifest
from trt_eagle3.drafts.registry import find_draft
from trt_eagle3.families.registry import read_target

__all__ = ["add_head", "change_config", "hf_head", "layer_of", "read_head", "save_tensors"]

CLASSES: Mapping[str, tuple[Any, Any, Any]] = {
    "qwen3_5": (
        dense.Qwen3_5DecoderLayer,
        dense.Qwen3_5TextRotaryEmbedding,
        dense.Qwen3_5RMSNorm,
    ),
    "qwen3_5_moe": (
        moe.Qwen3_5MoeDecoderLayer,
        moe.Qwen3_5MoeTextRotaryEmbedding,
        moe.Qwen3_5MoeRMSNorm,
    ),
    "qwen3_next": (
        fused.Qwen3NextDecoderLayer,
        fused.Qwen3NextRotaryEmbedding,
        fused.Qwen3NextRMSNorm,
    ),
}
"""Layer, rope and norm of a ``model_type``."""


def add_head(folder: Path, *, seed: int = 11, **config: Any) -> Path:
    """Write a head into the checkpoint ``folder``, by the names of its last layer that attends."""
    tensors = load_file(folder / "model.safetensors")
    old = layer_of(tensors)
    prefix = next(n for n in tensors if f"layers.{old}." in n).split(f"layers.{old}.")[0]
    shapes = {
        name.replace(f"{prefix}layers.{old}.", "mtp.layers.0."): tuple(tensor.shape)
        for name, tensor in tensors.items()
        if name.startswith(f"{prefix}layers.{old}.")
    }
    hidden = tensors[f"{prefix}norm.weight"].shape[0]
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    shapes |= {"mtp.fc.weight": (hidden, 2 * hidden)}
    shapes |= {f"mtp.{name}.weight": (hidden,) for name in norms}
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: random_tensor(name, shape, generator) for name, shape in shapes.items()}
    drawn = {n: t - 1 if t.ndim == 1 and "norm" in n else t for n, t in drawn.items()}
    save_tensors(folder, tensors | drawn)
    change_config(folder, **{"mtp_num_hidden_layers": 1, **config})
    return folder


def layer_of(tensors: Mapping[str, Tensor]) -> int:
    """The last layer that attends."""
    names = (n for n in tensors if n.endswith("self_attn.q_proj.weight") and "mtp." not in n)
    return max(int(name.split("layers.")[1].split(".")[0]) for name in names)


def save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """In place of those that are there."""
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    """Keys of the text model's config; None takes one away."""
    file = folder / "config.json"
    whole = json.loads(file.read_text())
    config = whole.get("text_config", whole)
    config.update(changes)
    for key in [key for key, value in changes.items() if value is None]:
        del config[key]
    file.write_text(json.dumps(whole))


def read_head(folder: Path, **overrides: Any) -> MtpManifest:
    """The head of ``folder``, the target's lm_head among its tensors."""
    manifest: DraftManifest = find_draft("mtp", read_target(folder), overrides)
    assert isinstance(manifest, MtpManifest)
    return manifest


def _stacked(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """``layer`` with experts, which are saved one by one, as transformers has them in memory."""
    experts = {n: t for n, t in layer.items() if ".experts." in n}
    made = {n: t for n, t in layer.items() if n not in experts}
    of = {p: [experts[n] for n in sorted(experts) if p in n] for p in ("gate_", "up_", "down_")}
    if experts:
        pairs = zip(of["gate_"], of["up_"], strict=True)
        made["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        made["mlp.experts.down_proj"] = torch.stack(of["down_"])
    return made


@torch.no_grad()
def hf_head(
    folder: Path, embeds: Tensor, hidden: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits [T, V] and the next step's hidden states [T, H] by transformers' modules.

    Args:
        embeds: [T, H] of the tokens one ahead. hidden: [T, H]. positions: [3, T].
    """
    config = AutoConfig.from_pretrained(folder)
    config = getattr(config, "text_config", config)
    config._attn_implementation, config._experts_implementation = "sdpa", "eager"
    layer_class, rotary_class, norm_class = CLASSES[config.model_type.removesuffix("_text")]
    tensors = load_file(folder / "model.safetensors")
    index = layer_of(tensors)
    layer = layer_class(config, index)
    own = {n.removeprefix("mtp."): t for n, t in tensors.items() if n.startswith("mtp.")}
    layer.load_state_dict(
        _stacked(
            {n.removeprefix("layers.0."): t for n, t in own.items() if n.startswith("layers.0.")}
        )
    )
    rotary = rotary_class(config)

    def norm(x: Tensor, name: str) -> Tensor:
        module = norm_class(config.hidden_size, eps=config.rms_norm_eps)
        module.load_state_dict({"weight": own[f"{name}.weight"]})
        found: Tensor = module(x)
        return found

    halves = [norm(embeds, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")]
    x = torch.cat(halves, dim=-1) @ own["fc.weight"].T
    rows = positions[:1] if rotary_class is fused.Qwen3NextRotaryEmbedding else positions[:, None]
    rope = rotary(x[None], rows)
    y = norm(layer.eval()(x[None], position_embeddings=rope)[0], "norm")
    head = tensors.get("lm_head.weight")
    if head is None:
        head = next(t for n, t in tensors.items() if n.endswith("embed_tokens.weight"))
    return y @ head.T, y
