"""Checkpoints of published geometries without their weights: sparse files that need no space."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.synthetic_block import BLOCK_DRAFTS, Tensors, block_draft
from benchmarks.synthetic_families import FAMILY_SIZES, family_config
from benchmarks.synthetic_hybrid import HYBRID_SIZES, hybrid_class, hybrid_config
from trt_eagle3.dtype import dtype_of_safetensors

__all__ = [
    "SIZES",
    "draft_option",
    "size_option",
    "target_model",
    "target_sizes",
    "write_draft",
    "write_target",
]

_VOCAB = 151936
_DRAFT_VOCAB = 32000

# hidden, layers, heads, kv heads, intermediate, tied head; then the vision tower's depth, hidden,
# intermediate, levels
SIZES: Mapping[str, tuple[int, int, int, int, int, bool, int, int, int, tuple[int, ...]]] = {
    "2b": (2048, 28, 16, 8, 6144, True, 24, 1024, 4096, (5, 11, 17)),
    "4b": (2560, 36, 32, 8, 9728, True, 24, 1024, 4096, (5, 11, 17)),
    "8b": (4096, 36, 32, 8, 12288, False, 27, 1152, 4304, (8, 16, 24)),
    "32b": (5120, 64, 64, 8, 25600, False, 27, 1152, 4304, (8, 16, 24)),
    "30b-a3b": (2048, 48, 32, 4, 6144, False, 27, 1152, 4304, (8, 16, 24)),
}
_EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "30b-a3b": {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
}
"""Further config entries of a mixture of experts."""
target_sizes = (*SIZES, *FAMILY_SIZES)
"""Sizes with a vision tower."""
size_option = click.option(
    "--size",
    type=click.Choice([*SIZES, *HYBRID_SIZES]),
    default="8b",
    show_default=True,
    help="Geometry (benchmarks/synthetic.py).",
)
draft_option = click.option(
    "--draft",
    type=click.Choice(["eagle3", *BLOCK_DRAFTS]),
    default="eagle3",
    show_default=True,
    help="Kind and block size of the draft (benchmarks/synthetic_block.py).",
)


def write_target(
    directory: Path, size: str, num_shards: int = 4, num_layers: int | None = None
) -> None:
    """Write a sharded bfloat16 checkpoint of ``size`` with zeros, named as by transformers.

    The family is Qwen3-VL, its mixture, Qwen3.5, Qwen3-Next, Qwen2.5-VL or InternVL3.5.

    ``num_layers``: decoder layers, if fewer than the geometry's.
    """
    config, model_class = target_model(size, num_layers)
    with torch.device("meta"):
        model = model_class(config)
    shapes = {name: ("BF16", tuple(t.shape)) for name, t in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    directory.mkdir(parents=True, exist_ok=True)
    config.architectures = [model_class.__name__]
    config.save_pretrained(directory)
    names = list(shapes)
    index: dict[str, str] = {}
    for shard in range(num_shards):
        part = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        _write_sparse(directory / file, {name: shapes[name] for name in part}, {})
        index |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )


def _hybrid(size: str, num_layers: int | None) -> tuple[Any, Any] | None:
    """Return config and model class of transformers; None for another family."""
    if size not in HYBRID_SIZES:
        return None
    return hybrid_config(size, num_layers), hybrid_class(size)


def target_model(size: str, num_layers: int | None = None) -> tuple[Any, Any]:
    """Return transformers' config and class of the model of ``size``."""
    if size in FAMILY_SIZES:
        return family_config(size, num_layers)
    return _hybrid(size, num_layers) or _vision_language(size, num_layers)


def _vision_language(size: str, num_layers: int | None) -> tuple[Any, Any]:
    from transformers import (
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLMoeConfig,
        Qwen3VLMoeForConditionalGeneration,
    )

    config_class, model_class = (
        (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration)
        if size in _EXPERTS
        else (Qwen3VLConfig, Qwen3VLForConditionalGeneration)
    )
    hidden, layers, heads, kv_heads, inner, tied, depth, vision_hidden, vision_inner, levels = (
        SIZES[size]
    )
    layers = num_layers or layers
    config = config_class(
        text_config={
            **_EXPERTS.get(size, {}),
            "vocab_size": _VOCAB,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
            "eos_token_id": 151645,
        },
        vision_config={
            "depth": depth,
            "hidden_size": vision_hidden,
            "intermediate_size": vision_inner,
            "num_heads": 16,
            "out_hidden_size": hidden,
            "deepstack_visual_indexes": list(levels),
        },
        tie_word_embeddings=tied,
    )
    return config, model_class


def write_draft(
    directory: Path, size: str, num_layers: int | None = None, kind: str = "eagle3"
) -> None:
    """Write a draft for ``size``: zeros, and a vocabulary map.

    ``num_layers``: of the target. ``kind``: ``eagle3`` (SpecForge's layout) or a block draft's.
    """
    hidden, layers, heads, kv_heads, inner, vocab = _draft_size(size)
    layers = num_layers or layers
    directory.mkdir(parents=True, exist_ok=True)
    if kind in BLOCK_DRAFTS:
        config, tensors = block_draft(kind, hidden, layers, inner, vocab)
        _write_sparse(directory / "model.safetensors", tensors, {})
        (directory / "config.json").write_text(json.dumps(config, indent=2))
        return
    q, kv = heads * 128, kv_heads * 128
    shapes: Tensors = {
        "fc.weight": ("BF16", (hidden, 3 * hidden)),
        "midlayer.self_attn.q_proj.weight": ("BF16", (q, 2 * hidden)),
        "midlayer.self_attn.k_proj.weight": ("BF16", (kv, 2 * hidden)),
        "midlayer.self_attn.v_proj.weight": ("BF16", (kv, 2 * hidden)),
        "midlayer.self_attn.o_proj.weight": ("BF16", (hidden, q)),
        "midlayer.mlp.gate_proj.weight": ("BF16", (inner, hidden)),
        "midlayer.mlp.up_proj.weight": ("BF16", (inner, hidden)),
        "midlayer.mlp.down_proj.weight": ("BF16", (hidden, inner)),
        "midlayer.hidden_norm.weight": ("BF16", (hidden,)),
        "midlayer.input_layernorm.weight": ("BF16", (hidden,)),
        "midlayer.post_attention_layernorm.weight": ("BF16", (hidden,)),
        "norm.weight": ("BF16", (hidden,)),
        "lm_head.weight": ("BF16", (_DRAFT_VOCAB, hidden)),
        "d2t": ("I64", (_DRAFT_VOCAB,)),
        "t2d": ("BOOL", (vocab,)),
    }
    kept = torch.zeros(vocab, dtype=torch.bool)
    kept[:_DRAFT_VOCAB] = True
    _write_sparse(directory / "model.safetensors", shapes, {"t2d": kept.numpy().tobytes()})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
        "vocab_size": vocab,
        "draft_vocab_size": _DRAFT_VOCAB,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, layers // 2 - 1, layers - 4]},
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def _draft_size(size: str) -> tuple[int, int, int, int, int, int]:
    """Return hidden, the target's layers, heads of 128, KV heads, intermediate and vocabulary."""
    if size in HYBRID_SIZES:
        s = HYBRID_SIZES[size]
        return s.hidden, s.layers, s.hidden // 128, max(s.hidden // 512, 1), s.inner, s.vocab
    hidden, layers, heads, kv_heads, inner, *_ = SIZES[size]
    return hidden, layers, heads, kv_heads, inner, _VOCAB


def _write_sparse(file: Path, shapes: Tensors, data: Mapping[str, bytes]) -> None:
    """Write a safetensors file of zeros that occupies only its header and ``data``'s tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in shapes.items():
        size = dtype_of_safetensors(dtype).num_bytes(prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        start = stream.tell()
        stream.truncate(start + end)
        for name, raw in data.items():
            stream.seek(start + header[name]["data_offsets"][0])
            stream.write(raw)
