"""Block drafts of published geometries without their weights (``benchmarks/synthetic.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["BLOCK_DRAFTS", "BlockDraft", "Tensors", "block_draft"]

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""Type and shape of each tensor, by name."""

_LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _RANK = 5, 32, 8, 128, 256
_TAPS, _GROUP, _TOP_K = 2, 16, 16


@dataclass(frozen=True)
class BlockDraft:
    """Method and block size of a draft; ``window``: of all layers but the last, 0 if none."""

    method: str
    block_size: int
    window: int = 0


BLOCK_DRAFTS: Mapping[str, BlockDraft] = {
    "dflash8": BlockDraft("dflash", 8),
    "dflash16": BlockDraft("dflash", 16),
    "dflash16-window": BlockDraft("dflash", 16, window=2048),
    "dflash2-8": BlockDraft("dflash2", 8),
    "dspark7": BlockDraft("dspark", 7),
}
"""Drafts of z-lab (DFlash, DFlash2) and DeepSpec (DSpark): 5 layers of 32 / 8 heads of 128."""


def block_draft(
    name: str, hidden: int, target_layers: int, inner: int, vocab: int
) -> tuple[dict[str, Any], Tensors]:
    """Return config and tensors of the draft ``name`` for a target of ``hidden`` and ``vocab``."""
    draft = BLOCK_DRAFTS[name]
    ids = [1 + i * (target_layers - 4) // (_LAYERS - 1) for i in range(_LAYERS)]
    own = {"mask_token_id": vocab - 1, "target_layer_ids": ids}
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "num_hidden_layers": _LAYERS,
        "num_target_layers": target_layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
        "vocab_size": vocab,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "block_size": draft.block_size,
        "layer_types": ["full_attention"] * _LAYERS,
    }
    if draft.window:
        kinds = ["sliding_attention"] * (_LAYERS - 1) + ["full_attention"]
        config |= {"layer_types": kinds, "sliding_window": draft.window, "is_causal": False}
        config["use_sliding_window"] = True
    shapes = _trunk(hidden, inner)
    if draft.method == "dspark":
        heads = {"markov_rank": _RANK, "markov_head_type": "vanilla"}
        confidence = {"enable_confidence_head": True, "confidence_head_with_markov": True}
        config |= {"architectures": ["Qwen3DSparkModel"], **own, **heads, **confidence}
        shapes |= {
            "markov_head.markov_w1.weight": (vocab, _RANK),
            "markov_head.markov_w2.weight": (vocab, _RANK),
            "confidence_head.proj.weight": (1, hidden + _RANK),
            "confidence_head.proj.bias": (1,),
        }
    elif draft.method == "dflash2":
        sizes = {"conv_kernel_size": _TAPS, "conv_group_size": _GROUP}
        selector = {"selector_rank": _RANK, "selector_top_k": _TOP_K}
        config |= {"architectures": ["DFlash2DraftModel"], "is_causal": False}
        config["dflash_config"] = {**own, **sizes, **selector}
        shapes |= _convolutions(hidden)
        for part in ("predecessor", "successor"):
            shapes[f"candidate_selector.{part}_codebook"] = (vocab, _RANK)
        shapes["candidate_selector.hidden_projection.weight"] = (_RANK, hidden)
    else:
        config |= {"architectures": ["DFlashDraftModel"], "is_causal": False, "dflash_config": own}
    return config, {name: ("BF16", shape) for name, shape in shapes.items()}


def _trunk(hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    q, kv = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, _LAYERS * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(_LAYERS):
        layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "self_attn.q_norm.weight": (_HEAD_DIM,),
            "self_attn.k_norm.weight": (_HEAD_DIM,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _convolutions(hidden: int) -> dict[str, tuple[int, ...]]:
    rows = 2 * _TAPS * (hidden // _GROUP)
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(_LAYERS):
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{i}.{name}.base_kernel"] = (2, _TAPS, hidden)
            shapes[f"layers.{i}.{name}.kernel_projection.weight"] = (rows, hidden)
    return shapes
