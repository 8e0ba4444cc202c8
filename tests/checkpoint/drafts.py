"""Small random drafts in each producer's exact file format, and the targets that they are for.

Formats: as the producers' own exporters write them (SpecForge a6b6b02, SafeAILab EAGLE, AngelSlim
67394ce, speculators 0.9.0, ModelOpt 0.47.0, transformers 4.57 and 5.23).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.reference.checkpoint import random_tensor
from trt_eagle3.spec import (
    AttentionSpec,
    DenseMlp,
    LayerSpec,
    NormSpec,
    RopeSpec,
    TargetSpec,
    VisionSpec,
)

__all__ = [
    "Geometry",
    "draft_weights",
    "target_spec",
    "write_angelslim_draft",
    "write_generic_draft",
    "write_modelopt_draft",
    "write_safeailab_draft",
    "write_specforge_draft",
    "write_speculators_draft",
]

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Geometry:
    """A draft's sizes, and its target's."""

    hidden: int = 32
    target_hidden: int = 32
    inner: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 96
    draft_vocab: int = 24
    target_layers: int = 8
    num_aux: int = 3
    eps: float = 1e-6
    base: float = 5e6


def target_spec(geometry: Geometry | None = None) -> TargetSpec:
    """The target of a draft, without tensors."""
    g = geometry or Geometry()
    norm = NormSpec(1e-6)
    rope = RopeSpec.plain(16, 5e6, "interleaved", (4, 2, 2))
    attention = AttentionSpec(4, 2, 16, rope, norm, False, False)
    blocks = (0, 1)
    layers = tuple(
        LayerSpec(attention, DenseMlp(64), norm, i if i < len(blocks) else None)
        for i in range(g.target_layers)
    )
    vision = VisionSpec(
        *(2, 16, 24, 2, 3, 2, 2, 2, g.target_hidden, 16),
        blocks,
        "gelu_pytorch_tanh",
        *(5, 6, 7, 8),
    )
    return TargetSpec("qwen3_vl", g.target_hidden, g.vocab, 512, layers, norm, False, (9,), vision)


def draft_weights(
    geometry: Geometry,
    *,
    layers: int = 1,
    qk_norm: bool = False,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    fc_bias: bool = False,
    embedding: bool = False,
    seed: int = 0,
) -> Weights:
    """Random weights under canonical names, d2t (offsets) and t2d among them."""
    g, generator = geometry, torch.Generator().manual_seed(seed)
    linears: dict[str, tuple[int, int, bool]] = {
        "fc": (g.hidden, g.num_aux * g.target_hidden, fc_bias)
    }
    norms = {"norm": g.hidden}
    norms |= {f"fc_norm.{i}": g.target_hidden for i in range(g.num_aux if fc_norm else 0)}
    norms |= {"input_norm": g.num_aux * g.target_hidden} if norm_before_fc else {}
    for n in range(layers):
        q, kv, width = (
            g.heads * g.head_dim,
            g.kv_heads * g.head_dim,
            g.hidden if n else 2 * g.hidden,
        )
        attention = {"q": (q, width), "k": (kv, width), "v": (kv, width), "o": (g.hidden, q)}
        linears |= {
            f"layers.{n}.self_attn.{p}_proj": (*s, attention_bias) for p, s in attention.items()
        }
        mlp = {"gate": (g.inner, g.hidden), "up": (g.inner, g.hidden), "down": (g.hidden, g.inner)}
        linears |= {f"layers.{n}.mlp.{p}_proj": (*s, mlp_bias) for p, s in mlp.items()}
        names = ["input_layernorm", "post_attention_layernorm"] + ([] if n else ["hidden_norm"])
        norms |= {f"layers.{n}.{name}": g.hidden for name in names}
        norms |= {f"layers.{n}.self_attn.{p}_norm": g.head_dim for p in ("qk" if qk_norm else "")}
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.weight": (rows, cols) for name, (rows, cols, _) in linears.items()
    }
    shapes |= {f"{name}.bias": (rows,) for name, (rows, _, biased) in linears.items() if biased}
    shapes |= {f"{name}.weight": (width,) for name, width in norms.items()}
    shapes |= {"lm_head.weight": (g.draft_vocab, g.hidden)}
    shapes |= {"embed_tokens.weight": (g.vocab, g.hidden)} if embedding else {}
    weights = {name: random_tensor(name, shape, generator) for name, shape in shapes.items()}
    kept = torch.randperm(g.vocab, generator=generator)[: g.draft_vocab].sort().values
    weights["d2t"] = kept - torch.arange(g.draft_vocab)
    weights["t2d"] = torch.zeros(g.vocab, dtype=torch.bool).scatter(0, kept, True)
    return weights


def _llama(g: Geometry, **changes: Any) -> dict[str, Any]:
    """What every llama-like draft's config has."""
    config = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": g.head_dim,
        "hidden_act": "silu",
        "hidden_size": g.hidden,
        "initializer_range": 0.02,
        "intermediate_size": g.inner,
        "max_position_embeddings": 512,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": g.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": g.kv_heads,
        "pad_token_id": None,
        "pretraining_tp": 1,
        "rms_norm_eps": g.eps,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": g.vocab,
    }
    config |= {"target_hidden_size": g.target_hidden} if g.target_hidden != g.hidden else {}
    return {**config, **changes}


def _rope(spelling: str, base: float, rope: dict[str, Any] | None) -> dict[str, Any]:
    """``rope`` as transformers 4.57 spells it (``old``), as 5.x does (``new``), or both as
    SpecForge's exporter.
    """
    old = {"rope_scaling": rope, "rope_theta": base}
    new = {"rope_parameters": {**(rope or {"rope_type": "default"}), "rope_theta": base}}
    both = {**new, "rope_theta": base, **({"rope_scaling": rope} if rope else {})}
    return {"old": old, "new": new, "both": both}[spelling]


def _write(
    folder: Path, config: dict[str, Any], weights: Weights, layer_zero: str = "layers.0."
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    renamed = {
        (
            layer_zero + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name
        ): tensor.contiguous()
        for name, tensor in weights.items()
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def write_specforge_draft(
    folder: Path,
    geometry: Geometry | None = None,
    *,
    spelling: str = "both",
    rope: dict[str, Any] | None = None,
    fc_norm: bool = False,
    aux: list[int] | None = None,
    embedding: bool = False,
    **config: Any,
) -> Weights:
    """SpecForge's ``to_sglang`` (without embedding) or ``to_hf`` (with it).

    A full vocabulary keeps its d2t and t2d.
    """
    g = geometry or Geometry()
    weights = draft_weights(g, fc_norm=fc_norm, embedding=embedding)
    keys: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": g.draft_vocab,
    }
    keys |= {"fc_norm": True, "norm_output": True} if fc_norm else {}
    if aux is not None:
        keys["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": aux,
            "use_aux_hidden_state": True,
        }
    _write(
        folder,
        {**_llama(g), **keys, **_rope(spelling, g.base, rope), **config},
        weights,
        "midlayer.",
    )
    return weights


def write_safeailab_draft(
    folder: Path,
    geometry: Geometry | None = None,
    *,
    binary: bool = True,
    embedding: bool = True,
    **config: Any,
) -> Weights:
    """SafeAILab's traineagle3:

    ``pytorch_model.bin`` with the embedding; its config has neither head_dim nor rope.
    """
    g = geometry or replace(Geometry(), head_dim=8)
    weights = draft_weights(g, embedding=embedding)
    base = _llama(
        g, architectures=["LlamaForCausalLM"], draft_vocab_size=g.draft_vocab, pad_token_id=0
    )
    for key in ("head_dim", "attention_bias", "mlp_bias", "attention_dropout", "pretraining_tp"):
        del base[key]
    _write(folder, {**base, "transformers_version": "4.28.1", **config}, weights, "midlayer.")
    if binary:
        (folder / "model.safetensors").unlink()
        named = {n.replace("layers.0.", "midlayer."): t for n, t in weights.items()}
        torch.save(named, folder / "pytorch_model.bin")
    return weights


def write_angelslim_draft(
    folder: Path,
    geometry: Geometry | None = None,
    *,
    spelling: str = "old",
    rope: dict[str, Any] | None = None,
    **config: Any,
) -> Weights:
    """AngelSlim's VLM drafts: no embedding, and tie_word_embeddings true beside a head of their
    own.
    """
    g = geometry or Geometry()
    weights = draft_weights(g)
    keys = {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "draft_vocab_size": g.draft_vocab,
        "image_token_id": 5,
        "modal_type": "VLM",
        "target_model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "video_token_id": 6,
        "vision_end_token_id": 8,
        "vision_start_token_id": 7,
    }
    _write(
        folder,
        {**_llama(g), **keys, **_rope(spelling, g.base, rope), **config},
        weights,
        "midlayer.",
    )
    return weights


def write_speculators_draft(
    folder: Path,
    geometry: Geometry | None = None,
    *,
    layers: int = 1,
    style: str = "llama",
    spelling: str = "new",
    rope: dict[str, Any] | None = None,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    attention_bias: bool = False,
    full_vocab: bool = False,
    aux: list[int] | None = None,
    **config: Any,
) -> Weights:
    """speculators' save_pretrained, with its auto_map and config.py, which must never be run."""
    g = geometry or Geometry()
    g = replace(g, draft_vocab=g.vocab) if full_vocab else g
    weights = draft_weights(
        g,
        layers=layers,
        qk_norm=style == "qwen3",
        fc_norm=fc_norm,
        norm_before_fc=norm_before_fc,
        attention_bias=attention_bias,
        embedding=True,
    )
    if full_vocab:
        del weights["d2t"], weights["t2d"]
    layer = {**_llama(g, num_hidden_layers=layers, model_type=style, attention_bias=attention_bias)}
    layer |= _rope(spelling, g.base, rope) | {"transformers_version": "5.23.0"}
    if style == "qwen3":
        layer |= {
            "layer_types": ["full_attention"] * layers,
            "sliding_window": None,
            "use_sliding_window": False,
        }
        del layer["mlp_bias"], layer["pretraining_tp"]
    layer.pop("target_hidden_size", None)
    keys = {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": g.draft_vocab,
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": aux,
        "embed_requires_grad": False,
        "fc_norm": fc_norm,
        "norm_before_fc": norm_before_fc,
        "norm_before_residual": True,
        "norm_output": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {
                "architectures": ["Qwen3VLForConditionalGeneration"],
                "name_or_path": None,
            },
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": g.target_hidden if g.target_hidden != g.hidden else None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "transformers_version": "5.23.0",
    }
    merged = {key: value for key, value in {**keys, **config}.items() if value != "absent"}
    _write(folder, merged, weights)
    (folder / "config.py").write_text("raise SystemExit('never run this')\n")
    return weights


def write_modelopt_draft(
    folder: Path,
    geometry: Geometry | None = None,
    *,
    layers: int = 1,
    aux: list[int] | None = None,
    rope: dict[str, Any] | None = None,
    full_vocab: bool = False,
    **config: Any,
) -> Weights:
    """ModelOpt's exporter: layers.N, d2t but no t2d, and yarn put over the rope of training
    unless said otherwise.
    """
    g = geometry or Geometry()
    g = replace(g, draft_vocab=g.vocab) if full_vocab else g
    weights = draft_weights(g, layers=layers)
    del weights["t2d"]
    if full_vocab:
        del weights["d2t"]
    injected = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
    keys = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": g.draft_vocab,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": aux or [1, 3, 4],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": 1,
        },
        "rope_scaling": injected if rope is None else rope,
        "rope_theta": g.base,
        "transformers_version": None,
    }
    _write(folder, {**_llama(g, num_hidden_layers=layers), **keys, **config}, weights)
    return weights


def write_generic_draft(folder: Path, geometry: Geometry | None = None, **config: Any) -> Weights:
    """An EAGLE-3 draft of nobody that is known."""
    g = geometry or Geometry()
    weights = draft_weights(g)
    keys = {"architectures": ["Eagle3Qwen3vlForCausalLM"], "draft_vocab_size": g.draft_vocab}
    _write(folder, {**_llama(g), **keys, **_rope("old", g.base, None), **config}, weights)
    return weights
