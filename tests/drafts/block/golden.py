"""What producers' own code computed for tiny drafts, and the same drafts in our reference.

A file of ``goldens/`` holds numbers alone: the config, the shapes of the tensors, and of each block
its rows and drafts. Weights and aux states are drawn from the name of the tensor on both sides, by
numpy's frozen generator (``RandomState``).

Producers, all in float32 on a CPU, under torch 2.13 and transformers 5.23:
- ``dflash*``: z-lab's package dflash 0.1.0 (PyPI), ``dflash_generate`` of ``dflash/model.py`` over
  a target of prepared aux states.
- ``dspark_*``: DeepSpec (deepseek-ai, afdfa7c9), ``forward_dspark_draft_block`` and
  ``build_dspark_proposal`` of ``deepspec/eval/dspark/draft_ops.py``.
- ``speculators_*``: speculators 0.9.0 (PyPI), the training forwards of
  ``speculators/models/{dflash,dflash2,dspark}/core.py``.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trt_eagle3.checkpoint.rope_schedule import make_rope
from trt_eagle3.drafts.block.manifest import (
    BlockLayer,
    BlockManifest,
    ConfidenceHead,
    MarkovHead,
)
from trt_eagle3.drafts.block.reference import BlockReference, BlockRows

HERE = Path(__file__).parent / "goldens"
NAMES = tuple(sorted(path.stem for path in HERE.glob("*.json")))
NUM_AUX_ROWS = 64
DSPARK = {"method": "dspark", "shift": "next", "anchor_row": True, "head": "own"}
CONVOLVED = {"method": "dflash2", "selector_rank": 6, "selector_top_k": 4}

RESOLVED: Mapping[str, Mapping[str, Any]] = {
    "dflash": {},
    "dflash_scaled_yarn": {
        "attention_bias": True,
        "embedding_scale": 1.5,
        "logit_multiplier": 0.5,
        "logit_softcap": 2.0,
    },
    "dflash_sliding": {
        "layers": (BlockLayer(causal=True, window=4), BlockLayer(causal=False, window=0))
    },
    "dflash_sliding_bidirectional": {
        "layers": (BlockLayer(causal=False, window=4), BlockLayer(causal=False, window=0))
    },
    "dflash_causal": {"layers": (BlockLayer(causal=True, window=0),) * 2},
    "dflash2": CONVOLVED
    | {"layers": (BlockLayer(causal=False, window=6),) * 2, "conv_kernel": 2, "conv_group": 4},
    "dflash2_taps3": CONVOLVED | {"conv_kernel": 3, "conv_group": 8},
    "dspark_vanilla": DSPARK
    | {
        "markov": MarkovHead(form="vanilla", rank=6, state_from_anchor=False),
        "confidence": ConfidenceHead(with_markov=True, temperatures=()),
    },
    "dspark_gated": DSPARK
    | {
        "markov": MarkovHead(form="gated", rank=6, state_from_anchor=False),
        "confidence": ConfidenceHead(with_markov=False, temperatures=()),
    },
    "dspark_rnn": DSPARK
    | {
        "markov": MarkovHead(form="rnn", rank=6, state_from_anchor=False),
        "confidence": ConfidenceHead(with_markov=True, temperatures=()),
    },
    "dspark_rank0": DSPARK,
    "speculators_dflash": {
        "layers": (BlockLayer(causal=True, window=3), BlockLayer(causal=False, window=0)),
        "window_rule": "anchor",
    },
    "speculators_dflash_non_causal": {
        "layers": (BlockLayer(causal=False, window=3), BlockLayer(causal=False, window=0)),
        "window_rule": "anchor",
    },
    "speculators_dspark_rnn": {
        "method": "dspark",
        "head": "own",
        "markov": MarkovHead(form="rnn", rank=6, state_from_anchor=True),
        "confidence": ConfidenceHead(with_markov=True, temperatures=()),
    },
    "speculators_dspark_gated": DSPARK
    | {
        "markov": MarkovHead(form="gated", rank=6, state_from_anchor=False),
        "confidence": ConfidenceHead(with_markov=True, temperatures=()),
    },
    "speculators_dflash2": CONVOLVED | {"conv_kernel": 2, "conv_group": 4},
}
"""How each config reads, where it differs from a plain DFlash."""


@dataclass(frozen=True)
class Golden:
    """One producer's run: ``cycles`` are its blocks, in order."""

    name: str
    manifest: BlockManifest
    weights: Mapping[str, Tensor]
    aux: Tensor
    cycles: Sequence[Mapping[str, Any]]
    temperature: float

    def reference(self, manifest: BlockManifest | None = None) -> BlockReference:
        """Return our reference, by default as the draft is to be read."""
        return BlockReference(manifest or self.manifest, self.weights)

    def rows(self, cycle: Mapping[str, Any], reference: BlockReference | None = None) -> BlockRows:
        """Run a block of the producer's in our reference."""
        ours, position = reference or self.reference(), cycle["position"]
        context = ours.context(self.aux[:position])
        return ours.block(cycle["anchor"], position, cycle["rows"], context)


def load_golden(name: str) -> Golden:
    """Read ``goldens/<name>.json`` and draw the weights of its draft."""
    record = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    shapes = dict(record["tensors"])
    config = record["config"].get("transformer_layer_config", record["config"])
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    for table in ("embed_tokens.weight", "lm_head.weight"):
        shapes.setdefault(table, [vocab, hidden])  # the target's
    weights = {tensor: drawn(tensor, shape) for tensor, shape in shapes.items()}
    if "d2t" in record:
        weights["d2t"] = torch.tensor(record["d2t"])
    aux = drawn("aux", (NUM_AUX_ROWS, shapes["fc.weight"][1]))
    manifest = _manifest(record["config"], config, shapes, RESOLVED[name])
    return Golden(name, manifest, weights, aux, record["cycles"], record.get("temperature", 1.0))


def drawn(name: str, shape: Sequence[int]) -> Tensor:
    """Draw the tensor of a name, float32."""
    x = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(shape))
    if name.endswith("norm.weight"):
        x = 1 + 0.2 * x
    elif name.endswith("bias"):
        x = 0.5 * x
    elif name.endswith("base_kernel"):
        x = 0.6 * x
    elif len(shape) == 2 and name != "aux":
        x = 1.5 * x / shape[1] ** 0.5
    return torch.tensor(x, dtype=torch.float32)


def _manifest(
    top: Mapping[str, Any],
    config: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    resolved: Mapping[str, Any],
) -> BlockManifest:
    """Resolve a config: ordinary keys by name, the rest from ``resolved``."""
    rope = config["rope_parameters"]
    plain: dict[str, Any] = {
        "producer": "golden",
        "path": HERE,
        "method": "dflash",
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "target_hidden_size": config["hidden_size"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "vocab_size": config["vocab_size"],
        "draft_vocab_size": shapes["lm_head.weight"][0],
        "intermediate_size": config["intermediate_size"],
        "rms_norm_eps": config["rms_norm_eps"],
        "rope": make_rope(
            rope["rope_type"], rope["rope_theta"], config["head_dim"], parameters=rope
        ),
        "aux_layers": (0, 1),
        "aux_pre_deepstack": False,
        "embedding": "target",
        "head": "target",
        "tensors": {},
        "block_size": top["block_size"],
        "mask_token_id": top.get("dflash_config", top)["mask_token_id"],
        "mask_embedding": "token",
        "shift": "own",
        "anchor_row": False,
        "layers": (BlockLayer(causal=False, window=0),) * config["num_hidden_layers"],
        "window_rule": "row",
        "attention_bias": False,
        "sinks": False,
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
    return BlockManifest(**plain | dict(resolved))
