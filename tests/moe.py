"""Random mixtures of experts as transformers saves them, and their experts in other layouts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from tests.reference.target import VISION

__all__ = [
    "Layout",
    "save_qwen3_moe",
    "save_qwen3_vl_moe",
    "upcycled",
    "with_layout",
]

Layout = Literal["stacked", "transposed", "single", "fp8 stacked", "fp8 transposed", "fp8 single"]
TEXT = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 36,
    "moe_intermediate_size": 20,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
TOKENS = {
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}
SECTIONS = ("", "text_config", "vision_config")
BLOCK = (16, 8)
"""Rows and columns of an FP8 scale: blocks at the edges are short."""


def _randomised(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return model.eval().float()


def save_qwen3_moe(folder: Path, **changes: Any) -> Qwen3MoeForCausalLM:
    told = TEXT | {"rope_theta": 1e6} | changes
    config = Qwen3MoeConfig(**{key: value for key, value in told.items() if value is not None})
    model = _randomised(Qwen3MoeForCausalLM(config))
    model.save_pretrained(folder)
    return model


def save_qwen3_vl_moe(folder: Path, **changes: Any) -> Qwen3VLMoeForConditionalGeneration:
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
    text = TEXT | {"rope_parameters": rope | {"mrope_section": [2, 1, 1]}} | changes
    vision = VISION | {"out_hidden_size": text["hidden_size"]}
    config = Qwen3VLMoeConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **TOKENS
    )
    model = _randomised(Qwen3VLMoeForConditionalGeneration(config))
    model.save_pretrained(folder)
    return model


def with_layout(folder: Path, model: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """Write the experts of the checkpoint in ``folder`` anew; returns their values [E, out, in] by
    the stacked name.
    """
    file = folder / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if ".experts." not in n}
    experts = {n: p.detach() for n, p in model.state_dict().items() if ".experts." in n}
    values = {}
    for name, weight in experts.items():
        own, values[name] = _laid_out(name, weight, layout)
        tensors |= own
    save_file({n: t.contiguous() for n, t in tensors.items()}, file, {"format": "pt"})
    if layout.startswith("fp8"):
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK),
        }
        (folder / "config.json").write_text(json.dumps(config))
    return values


def _laid_out(name: str, weight: Tensor, layout: Layout) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of one projection, and their values [E, out, in]."""
    if not layout.startswith("fp8"):
        return _placed(name, weight, layout), weight
    pairs = [quantised(matrix) for matrix in weight]
    codes, scales = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    values = torch.stack([dequantised(*pair) for pair in pairs])
    how = layout.removeprefix("fp8 ")
    if how != "single":
        return {**_placed(name, codes, how), **_placed(f"{name}_scale_inv", scales, how)}, values
    found, own = {}, []
    for kind, rows in _single(name, weight):
        pair = quantised(rows)
        found |= dict(zip((f"{kind}.weight", f"{kind}.weight_scale_inv"), pair, strict=True))
        own.append(dequantised(*pair))
    return found, torch.cat(own).view(weight.shape)


def _placed(name: str, weight: Tensor, layout: str) -> dict[str, Tensor]:
    if layout == "single":
        return {f"{kind}.weight": rows for kind, rows in _single(name, weight)}
    return {name: weight.transpose(1, 2) if layout == "transposed" else weight}


def _single(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """Module and matrix of every expert's projections, in the order of the stack's rows."""
    prefix, _, kind = name.rpartition(".")
    names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    return [
        (f"{prefix}.{expert}.{own}", rows)
        for expert, matrix in enumerate(weight)
        for own, rows in zip(names, matrix.chunk(len(names)), strict=True)
    ]


def quantised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes [N, K], and float32 scales of blocks."""
    scales = torch.empty(-(-matrix.shape[0] // BLOCK[0]), -(-matrix.shape[1] // BLOCK[1]))
    codes = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    for i, j in _blocks(matrix):
        rows, columns = _span(i, 0), _span(j, 1)
        scales[i, j] = matrix[rows, columns].abs().max() / 448
        codes[rows, columns] = (matrix[rows, columns] / scales[i, j]).to(codes.dtype)
    return codes, scales


def dequantised(codes: Tensor, scales: Tensor) -> Tensor:
    values = codes.float()
    for i, j in _blocks(values):
        values[_span(i, 0), _span(j, 1)] *= scales[i, j]
    return values


def _blocks(matrix: Tensor) -> list[tuple[int, int]]:
    sizes = [-(-n // b) for n, b in zip(matrix.shape, BLOCK, strict=True)]
    return [(i, j) for i in range(sizes[0]) for j in range(sizes[1])]


def _span(index: int, axis: int) -> slice:
    return slice(index * BLOCK[axis], (index + 1) * BLOCK[axis])


def upcycled(folder: Path, dense: Path, *, num_experts: int = 3) -> Path:
    """The Qwen3 or Qwen3-VL in ``dense`` as a mixture of experts in ``folder`` that computes the
    same: each expert is the dense MLP, its inner values in an order of its own.

    So only experts whose gate, up and down are each other's give the dense answers. Layer 1 stays
    dense; stacks are [E, in, out], as Qwen3-VL-MoE was published.
    """
    shutil.copytree(dense, folder)
    config = json.loads((folder / "config.json").read_text())
    visual = "vision_config" in config
    family, sections = ("qwen3_vl", SECTIONS) if visual else ("qwen3", SECTIONS[:1])
    text = config["text_config"] if visual else config
    for section in sections:
        own = config[section] if section else config
        own["model_type"] = own["model_type"].replace(family, f"{family}_moe")
    config["architectures"] = [name.replace("ForC", "MoeForC") for name in config["architectures"]]
    text |= {
        "num_experts": num_experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": text["intermediate_size"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for prefix in sorted({n.rpartition("gate_proj")[0] for n in tensors if "mlp.gate_proj" in n}):
        if ".layers.1." in prefix:
            continue
        gate, up, down = (tensors.pop(f"{prefix}{p}_proj.weight") for p in ("gate", "up", "down"))
        orders = [torch.randperm(len(gate), generator=generator) for _ in range(num_experts)]
        stacked = torch.stack([torch.cat([gate[o], up[o]]) for o in orders])
        tensors[f"{prefix}experts.gate_up_proj"] = stacked.transpose(1, 2).contiguous()
        stacked = torch.stack([down[:, order] for order in orders])
        tensors[f"{prefix}experts.down_proj"] = stacked.transpose(1, 2).contiguous()
        router = torch.randn(num_experts, gate.shape[1], generator=generator)
        tensors[f"{prefix}gate.weight"] = router.to(gate.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
