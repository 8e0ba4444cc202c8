"""What producers' own code computed for tiny drafts, and the same drafts in our reference.

A file of ``goldens/`` holds numbers alone: the config, the shapes of the tensors, and of each block
its rows and drafts. Weights and aux states are drawn from the name of the tensor on both sides, by
numpy's frozen generator (``RandomState``). Our side writes them in the producer's layout and reads
that, so a run checks the reader and the reference.

Producers, all in float32 on a CPU, under torch 2.13 and transformers 5.23:
- ``dflash*``: z-lab's package dflash 0.1.0 (PyPI), ``dflash_generate`` of ``dflash/model.py`` over
  a target of prepared aux states.
- ``dspark_*``: DeepSpec (deepseek-ai, afdfa7c9), ``forward_dspark_draft_block`` and
  ``build_dspark_proposal`` of ``deepspec/eval/dspark/draft_ops.py``.
- ``specforge_*``: SpecForge (sgl-project, a6b6b023), ``OnlineDFlashModel`` of
  ``specforge/algorithms/common/dflash_family_model.py``, with its mask for sdpa.
- ``speculators_*``: speculators 0.9.0 (PyPI), the training forwards of
  ``speculators/models/{dflash,dflash2,dspark}/core.py``.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from trt_eagle3.drafts.block.manifest import BlockManifest
from trt_eagle3.drafts.block.reader import read_block
from trt_eagle3.drafts.block.reference import BlockReference, BlockRows

__all__ = ["NAMES", "Golden", "drawn", "load_golden", "vocabulary"]

HERE = Path(__file__).parent / "goldens"
NAMES = tuple(sorted(path.stem for path in HERE.glob("*.json")))
NUM_AUX_ROWS = 64
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Golden:
    """One producer's run. ``cycles`` are its blocks, in order."""

    reference: BlockReference
    aux: Tensor
    cycles: Sequence[Mapping[str, Any]]
    temperature: float

    @property
    def manifest(self) -> BlockManifest:
        return self.reference.manifest

    def rows(self, cycle: Mapping[str, Any], reference: BlockReference) -> BlockRows:
        """Run a block of the producer's in ``reference``."""
        position = cycle["position"]
        context = reference.context(self.aux[:position])
        return reference.block(cycle["anchor"], position, cycle["rows"], context)


@cache
def load_golden(name: str) -> Golden:
    """Read ``goldens/<name>.json`` and draw the weights of its draft."""
    record = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    config, shapes = record["config"], record["tensors"]
    geometry = config.get("transformer_layer_config", config)
    saved = {tensor: drawn(tensor, shape) for tensor, shape in shapes.items()}
    shape = (geometry["vocab_size"], geometry["hidden_size"])
    tables = {table: saved.get(table, drawn(table, shape)) for table in (EMBEDDING, HEAD)}
    if "transformer_layer_config" in config:  # speculators saves no copy of the target's tables
        del saved[EMBEDDING]
        if "d2t" in record:
            saved |= vocabulary(record["d2t"], geometry["vocab_size"])
        else:
            del saved[HEAD]
    with TemporaryDirectory() as folder:
        save_file(saved, Path(folder, "model.safetensors"))
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        read = BlockReference.load(read_block(Path(folder), None))
    reference = replace(read, weights={**tables, **read.weights})
    aux = drawn("aux", (NUM_AUX_ROWS, shapes["fc.weight"][1]))
    return Golden(reference, aux, record["cycles"], record.get("temperature", 1.0))


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


def vocabulary(d2t: Sequence[int], vocab_size: int) -> dict[str, Tensor]:
    """Return the two maps of a draft's vocabulary, as saved."""
    offsets = torch.tensor(d2t)
    kept = torch.zeros(vocab_size, dtype=torch.bool)
    kept[offsets + torch.arange(len(offsets))] = True
    return {"d2t": offsets, "t2d": kept}
