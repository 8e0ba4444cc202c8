"""Random drafts on disk, and what they have in common with random targets: how values are drawn
and written.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from trt_eagle3.checkpoint.manifest import Eagle3Manifest
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.drafts.eagle3.reference import Eagle3Reference
from trt_eagle3.spec import RopeSpec


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Values of the size that keeps activations near 1: norm weights around 1, matrices by their
    fan-in.
    """
    values = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 1 + 0.2 * values if name.endswith(".weight") else 0.2 * values
    return values / prod(shape[1:]) ** 0.5


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, TensorRef]:
    """Write a safetensors file; name -> place of each tensor in it."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return {
        name: TensorRef(
            name, file, 8 + size + start, stop - start, entry["dtype"], tuple(entry["shape"])
        )
        for name, entry in header.items()
        for start, stop in [entry["data_offsets"]]
    }


def file_name(ref: TensorRef) -> str:
    """A ``ResolveLocation`` for graphs whose weights root is the folder of the weights."""
    return ref.file.name


DRAFT_FIELDS: dict[str, Any] = {
    "producer": "test",
    "num_layers": 1,
    "hidden_size": 24,
    "target_hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32,
    "draft_vocab_size": 20,
    "rope": RopeSpec.plain(8, 10000.0),
    "aux_layers": (0, 1, 2),
    "aux_pre_deepstack": False,
    "residual": "hidden",
    "first_norm": "single",
    "norm_before_fc": False,
    "fc_norm": False,
    "feedback": "pre_norm",
    "qk_norm": False,
    "attention_bias": False,
    "mlp_bias": False,
    "fc_bias": False,
    "embedding": "target",
    "head": "own",
    "image_rows": "pad",
    "image_rows_rotated": True,
    "positions": "3d",
    "position_shift": 0,
}
"""A SpecForge-like draft; tests say only where theirs differs."""


def random_draft(
    directory: Path, *, stored: torch.dtype = torch.float32, seed: int = 0, **fields: Any
) -> Eagle3Reference:
    """A draft whose file holds every tensor that any variant could want, so that a test can
    plant any deviation.
    """
    m = Eagle3Manifest(path=directory, tensors={}, **{**DRAFT_FIELDS, **fields})
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: random_tensor(name, shape, generator).to(stored) for name, shape in _shapes(m).items()
    }
    if m.draft_vocab_size < m.vocab_size:
        kept = torch.randperm(m.vocab_size, generator=generator)[: m.draft_vocab_size].sort().values
        weights["d2t"] = kept - torch.arange(m.draft_vocab_size)
    refs = write_tensors(directory / "draft.safetensors", weights)
    manifest = Eagle3Manifest(path=directory, tensors=refs, **{**DRAFT_FIELDS, **fields})
    return Eagle3Reference(
        manifest, {n: w.float() if w.is_floating_point() else w for n, w in weights.items()}
    )


def _shapes(m: Eagle3Manifest) -> dict[str, tuple[int, ...]]:
    hidden, target, num_aux = m.hidden_size, m.target_hidden_size, len(m.aux_layers)
    linears = {"fc": (hidden, num_aux * target)}
    norms = {
        "input_norm": num_aux * target,
        "norm": hidden,
        **{f"fc_norm.{i}": target for i in range(num_aux)},
    }
    for layer in range(m.num_layers):
        prefix, width = f"layers.{layer}", hidden if layer else 2 * hidden
        linears |= {
            f"{prefix}.self_attn.q_proj": (m.num_heads * m.head_dim, width),
            f"{prefix}.self_attn.k_proj": (m.num_kv_heads * m.head_dim, width),
            f"{prefix}.self_attn.v_proj": (m.num_kv_heads * m.head_dim, width),
            f"{prefix}.self_attn.o_proj": (hidden, m.num_heads * m.head_dim),
            f"{prefix}.mlp.gate_proj": (m.intermediate_size, hidden),
            f"{prefix}.mlp.up_proj": (m.intermediate_size, hidden),
            f"{prefix}.mlp.down_proj": (hidden, m.intermediate_size),
        }
        norms |= {
            f"{prefix}.{n}": hidden
            for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        }
        norms |= {f"{prefix}.self_attn.{p}_norm": m.head_dim for p in "qk"}
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.weight": shape for name, shape in linears.items()
    }
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    shapes |= {f"{name}.weight": (width,) for name, width in norms.items()}
    shapes["lm_head.weight"] = (m.draft_vocab_size, hidden)
    shapes["embed_tokens.weight"] = (m.vocab_size, hidden)
    if m.parallel is not None:
        shapes["mask_hidden"] = (1, 1, num_aux * target)
    return shapes
