"""Small random block drafts in each producer's exact file format.

Formats: z-lab's published files and its ``dflash`` 0.1.0, DeepSpec, SpecForge 0.2 (and its early
nesting), RadixArk, speculators 0.9, ModelOpt 0.47 and AngelSlim 0.5.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.reference.checkpoint import random_tensor
from trt_eagle3.spec import AttentionSpec, DenseMlp, LayerSpec, NormSpec, RopeSpec, TargetSpec

__all__ = ["Geometry", "Weights", "block_weights", "target_spec", "write"]

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Geometry:
    """A draft's sizes, and its target's."""

    hidden: int = 32
    inner: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 96
    draft_vocab: int = 96
    layers: int = 2
    target_layers: int = 12
    num_aux: int = 3
    rank: int = 8
    taps: int = 2
    group: int = 8


def target_spec(geometry: Geometry | None = None, family: str = "qwen3") -> TargetSpec:
    """The target of a draft, without tensors."""
    g, norm = geometry or Geometry(), NormSpec(1e-6)
    attention = AttentionSpec(4, 2, 16, RopeSpec.plain(16, 1e6), norm, False, False)
    layers = (LayerSpec(attention, DenseMlp(64), norm),) * g.target_layers
    return TargetSpec(family, g.hidden, g.vocab, 512, layers, norm, False, (9,), None)


@cache
def block_weights(
    geometry: Geometry,
    *,
    dflash2: bool = False,
    markov: str = "",
    confidence: str = "",
    tables: bool = False,
    bias: bool = False,
) -> Weights:
    """Random weights under canonical names.

    Args:
        markov: the form of a markov head; empty for none.
        confidence: ``joined`` with the markov embedding, or ``hidden`` alone; empty for none.
        tables: whether it has its own embedding and head.
    """
    g, generator = geometry, torch.Generator().manual_seed(0)
    h, r, q, kv = g.hidden, g.rank, g.heads * g.head_dim, g.kv_heads * g.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, g.num_aux * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for i in range(g.layers):
        layer: dict[str, tuple[int, ...]] = {
            **{f"{n}_layernorm.weight": (h,) for n in ("input", "post_attention")},
            **{f"self_attn.{p}_norm.weight": (g.head_dim,) for p in "qk"},
            "self_attn.q_proj.weight": (q, h),
            "self_attn.k_proj.weight": (kv, h),
            "self_attn.v_proj.weight": (kv, h),
            "self_attn.o_proj.weight": (h, q),
            **{f"mlp.{p}_proj.weight": (g.inner, h) for p in ("gate", "up")},
            "mlp.down_proj.weight": (h, g.inner),
        }
        if bias:
            widths = {"q": q, "k": kv, "v": kv, "o": h}
            layer |= {f"self_attn.{p}_proj.bias": (n,) for p, n in widths.items()}
        if dflash2:
            for name in ("attention_conv", "mlp_conv"):
                layer[f"{name}.base_kernel"] = (2, g.taps, h)
                layer[f"{name}.kernel_projection.weight"] = (2 * g.taps * h // g.group, h)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if dflash2:
        shapes["candidate_selector.predecessor_codebook"] = (g.vocab, r)
        shapes["candidate_selector.successor_codebook"] = (g.vocab, r)
        shapes["candidate_selector.hidden_projection.weight"] = (r, h)
    if markov:
        shapes["markov_head.markov_w1.weight"] = (g.vocab, r)
        shapes["markov_head.markov_w2.weight"] = (g.draft_vocab, r)
    if markov == "gated":
        shapes |= {"markov_head.gate_proj.weight": (r, h + r), "markov_head.gate_proj.bias": (r,)}
    if markov == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * r, 2 * r + h)
        shapes["markov_head.joint_proj.bias"] = (3 * r,)
    if confidence:
        width = h + (r if confidence == "joined" else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    if tables:
        shapes |= {"embed_tokens.weight": (g.vocab, h), "lm_head.weight": (g.draft_vocab, h)}
    weights = {name: random_tensor(name, shape, generator) for name, shape in shapes.items()}
    if g.draft_vocab != g.vocab:
        kept = torch.randperm(g.vocab, generator=generator)[: g.draft_vocab].sort().values
        weights["d2t"] = kept - torch.arange(g.draft_vocab)
        weights["t2d"] = torch.zeros(g.vocab, dtype=torch.bool).scatter(0, kept, True)
    return weights


def _qwen3(g: Geometry) -> dict[str, Any]:
    """The keys of a Qwen3 layer, which all producers copy."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "eos_token_id": 9,
        "head_dim": g.head_dim,
        "hidden_act": "silu",
        "hidden_size": g.hidden,
        "initializer_range": 0.02,
        "intermediate_size": g.inner,
        "layer_types": ["full_attention"] * g.layers,
        "max_position_embeddings": 512,
        "max_window_layers": g.layers,
        "model_type": "qwen3",
        "num_attention_heads": g.heads,
        "num_hidden_layers": g.layers,
        "num_key_value_heads": g.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1e6,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": g.vocab,
    }


def _zlab(g: Geometry) -> dict[str, Any]:
    return {
        **_qwen3(g),
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "dflash_config": {"mask_token_id": 90, "target_layer_ids": [1, 5, 9]},
        "num_target_layers": g.target_layers,
    }


def _zlab_dflash2(g: Geometry) -> dict[str, Any]:
    selector = {"selector_rank": g.rank, "selector_top_k": 4}
    return {
        **_zlab(g),
        "architectures": ["DFlash2DraftModel"],
        "auto_map": {"AutoModel": "dflash2.DFlash2DraftModel"},
        "block_size": None,
        "is_causal": False,
        "layer_types": ["sliding_attention"] * g.layers,
        "sliding_window": 64,
        "use_sliding_window": True,
        "dflash_config": {
            "block_size": 8,
            "conv_group_size": g.group,
            "conv_kernel_size": g.taps,
            "mask_token_id": 90,
            "target_layer_ids": [1, 5, 9],
            **selector,
        },
    }


def _deepspec(g: Geometry) -> dict[str, Any]:
    return {
        **_qwen3(g),
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": g.rank,
        "mask_token_id": 90,
        "num_anchors": 512,
        "num_target_layers": g.target_layers,
        "target_layer_ids": [1, 5, 9],
    }


def _deepspec_rank0(g: Geometry) -> dict[str, Any]:
    config = {**_deepspec(g), "markov_rank": 0, "enable_confidence_head": False}
    del config["markov_head_type"], config["confidence_head_with_markov"]
    return config


def _specforge_dspark(g: Geometry) -> dict[str, Any]:
    return {
        **_zlab(g),
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "dflash_config": {
            "attention_mode": "gqa",
            "confidence_head_alpha": 1.0,
            "confidence_head_with_markov": True,
            "enable_confidence_head": True,
            "markov_head_type": "vanilla",
            "markov_rank": g.rank,
            "mask_token_id": 90,
            "projector_type": "dspark",
            "target_layer_ids": [1, 5, 9],
        },
        "target_hidden_size": None,
    }


def _radixark(g: Geometry) -> dict[str, Any]:
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8192}
    config = {**_zlab(g), "architectures": ["DSparkDraftModel"], "block_size": 7}
    del config["rope_theta"], config["rope_scaling"]
    return {
        **config,
        "dspark_config": {
            "block_size": 7,
            "confidence_head_with_markov": True,
            "enable_confidence_head": True,
            "markov_head_type": "vanilla",
            "markov_rank": g.rank,
        },
        "max_position_embeddings": 262144,
        "rope_parameters": {**yarn, "rope_theta": 1e7},
    }


def _speculators(g: Geometry, kind: str, names: str, drafts: int) -> dict[str, Any]:
    layer = _qwen3(g)
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}
    del layer["rope_scaling"]
    return {
        "architectures": [names],
        "aux_hidden_state_layer_ids": [2, 6, 10],
        "block_size": 8,
        "draft_vocab_size": g.draft_vocab,
        "dtype": "float32",
        "mask_token_id": 90,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "transformers_version": "5.23.0",
    }


def _speculators_dflash(g: Geometry) -> dict[str, Any]:
    return _speculators(g, "dflash", "DFlashDraftModel", 7)


def _speculators_dflash2(g: Geometry) -> dict[str, Any]:
    return {
        **_speculators(g, "dflash2", "DFlash2DraftModel", 7),
        "conv_group_size": g.group,
        "conv_kernel_size": g.taps,
        "selector_rank": g.rank,
        "selector_top_k": 4,
        "sliding_window_non_causal": True,
    }


def _speculators_dspark(g: Geometry) -> dict[str, Any]:
    return {
        **_speculators(g, "dspark", "DSparkDraftModel", 8),
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": g.rank,
        "sample_from_anchor": True,
    }


def _modelopt(g: Geometry) -> dict[str, Any]:
    config = _zlab(g)
    del config["auto_map"], config["dtype"], config["use_sliding_window"]
    nested = {**config["dflash_config"], "causal": False}
    return {**config, "dflash_config": nested, "torch_dtype": "bfloat16"}


def _modelopt_dspark(g: Geometry) -> dict[str, Any]:
    config = _modelopt(g)
    config["dflash_config"] |= {
        "markov_head_type": "vanilla",
        "markov_rank": g.rank,
        "projector_type": "dspark",
        "shift_label": True,
        "use_confidence_head": True,
    }
    return config


def _angelslim(g: Geometry) -> dict[str, Any]:
    config = {**_zlab(g), "architectures": ["QwenDFlashDraftModel"], "num_anchors": 512}
    del config["auto_map"]
    return {**config, "attention_backend": "flex_attention", "loss_decay_gamma": 7.0}


CONFIGS = {
    "z-lab": _zlab,
    "z-lab dflash2": _zlab_dflash2,
    "deepspec": _deepspec,
    "deepspec rank 0": _deepspec_rank0,
    "specforge dspark": _specforge_dspark,
    "radixark": _radixark,
    "speculators": _speculators_dflash,
    "speculators dflash2": _speculators_dflash2,
    "speculators dspark": _speculators_dspark,
    "modelopt": _modelopt,
    "modelopt dspark": _modelopt_dspark,
    "angelslim": _angelslim,
}
"""Layout -> its config."""

_WEIGHTS: dict[str, dict[str, Any]] = {
    "z-lab dflash2": {"dflash2": True},
    "deepspec": {"markov": "vanilla", "confidence": "joined", "tables": True},
    "deepspec rank 0": {"tables": True},
    "specforge dspark": {"markov": "vanilla", "confidence": "joined"},
    "radixark": {"markov": "vanilla", "confidence": "joined"},
    "speculators": {"tables": True},
    "speculators dflash2": {"dflash2": True, "tables": True},
    "speculators dspark": {"markov": "vanilla", "confidence": "joined", "tables": True},
    "modelopt dspark": {"markov": "vanilla", "confidence": "joined"},
}
_FLAT = (("markov_head.", ""), ("confidence_head.proj.", "confidence_proj."))


def write(
    folder: Path,
    layout: str,
    geometry: Geometry | None = None,
    *,
    weights: dict[str, Any] | None = None,
    names: str = "",
    drop: tuple[str, ...] = (),
    add: Weights | None = None,
    nested: dict[str, Any] | None = None,
    layer: dict[str, Any] | None = None,
    **config: Any,
) -> Weights:
    """Write a draft of ``layout`` and return its weights under canonical names.

    Args:
        weights: options of ``block_weights`` in place of the layout's.
        names: another naming: ``model.``, ``logit_head.`` or ``.weight`` (of codebooks).
        drop, add: tensors to leave out and to add.
        nested: keys of ``dflash_config`` to set; layer: of ``transformer_layer_config``.
        config: keys to set; ``"absent"`` removes one.
    """
    g = geometry or Geometry()
    made = dict(block_weights(g, **{**_WEIGHTS.get(layout, {}), **(weights or {})}))
    made = {n: t for n, t in made.items() if not n.startswith(drop or "\0")} | (add or {})
    keys = {**CONFIGS[layout](g), **config}
    for section, values in (("dflash_config", nested), ("transformer_layer_config", layer)):
        if values:
            keys[section] = {**keys.get(section, {}), **values}
    for part in (keys, keys.get("dflash_config", {}), keys.get("transformer_layer_config", {})):
        for key in [k for k, v in part.items() if v == "absent"]:
            del part[key]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(keys, indent=2), encoding="utf-8")
    stored = {_stored(name, layout, names): t.contiguous() for name, t in made.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return made


def _stored(name: str, layout: str, names: str) -> str:
    if layout == "modelopt dspark":
        name = next((n + name.removeprefix(o) for o, n in _FLAT if name.startswith(o)), name)
    if names == "model.":
        return f"model.{name}"
    if names == "logit_head." and name.startswith(("markov_head.", "confidence_head.")):
        return f"logit_head.{name}"
    if names == ".weight" and name.endswith("_codebook"):
        return f"{name}.weight"
    return name
