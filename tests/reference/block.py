"""Random block drafts on disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from tests.reference.checkpoint import random_tensor, write_tensors
from trt_eagle3.drafts.block.manifest import BlockLayer, BlockManifest
from trt_eagle3.drafts.block.reference import BlockReference
from trt_eagle3.drafts.block.shapes import block_shapes
from trt_eagle3.spec import RopeSpec

BLOCK_FIELDS: dict[str, Any] = {
    "producer": "test",
    "method": "dflash",
    "num_layers": 2,
    "hidden_size": 24,
    "target_hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32,
    "draft_vocab_size": 32,
    "rope": RopeSpec.plain(8, 10000.0),
    "aux_layers": (0, 1, 2),
    "aux_pre_deepstack": False,
    "embedding": "own",
    "head": "own",
    "block_size": 6,
    "mask_token_id": 31,
    "mask_embedding": "token",
    "shift": "own",
    "anchor_row": False,
    "layers": (BlockLayer(causal=False, window=0),) * 2,
    "window_rule": "row",
    "attention_bias": False,
    "embedding_scale": 1.0,
    "logit_multiplier": 1.0,
    "logit_softcap": 0.0,
    "conv_kernel": 0,
    "conv_group": 0,
    "selector_rank": 0,
    "selector_top_k": 0,
    "markov": None,
    "confidence": None,
}
"""A DFlash draft of z-lab; tests say only where theirs differs."""


def random_block(directory: Path, *, seed: int = 0, **fields: Any) -> BlockReference:
    """A draft with random weights in ``directory``, computed in float32."""
    m = BlockManifest(path=directory, tensors={}, **{**BLOCK_FIELDS, **fields})
    generator = torch.Generator().manual_seed(seed)
    weights = {n: random_tensor(n, s, generator) for n, s in block_shapes(m).items()}
    if m.draft_vocab_size < m.vocab_size:
        kept = torch.randperm(m.vocab_size, generator=generator)[: m.draft_vocab_size].sort().values
        weights["d2t"] = kept - torch.arange(m.draft_vocab_size)
    tensors = write_tensors(directory / "block.safetensors", weights)
    return BlockReference(dataclasses.replace(m, tensors=tensors), weights, torch.float32)
