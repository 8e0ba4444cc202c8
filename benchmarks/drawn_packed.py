"""Random quantised weights, as in a checkpoint with quantised projections."""

from __future__ import annotations

from typing import get_args

import click
import torch

from trt_eagle3.config import KVDtype
from trt_eagle3.engine.torch.moe import Experts, as_experts
from trt_eagle3.engine.torch.packed import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Nvfp4Weight,
    PackedWeight,
)
from trt_eagle3.graph.weights import WeightExpr

__all__ = ["PACKED_KINDS", "draw_packed", "kv_dtype_option", "packed_share", "weights_option"]

PACKED_KINDS = (
    "bfloat16",
    "fp8",
    "fp8-w8a8",
    "fp8-block",
    "int8",
    "int8-w8a8",
    "int4",
    "nvfp4",
)
"""Formats of projections.

FP8 with a scale per row, the same with ``engine.activations: fp8``, or with a scale per 128 x 128;
INT8 with a scale per row, the same with ``engine.activations: int8``; INT4 in groups of 128; NVFP4.
"""
_EXPERT_KINDS = ("fp8", "fp8-w8a8", "fp8-block", "int4")  # other kinds have bfloat16 experts
weights_option = click.option(
    "--weights",
    type=click.Choice(PACKED_KINDS),
    default="bfloat16",
    show_default=True,
    help="Format of the target's projections.",
)
kv_dtype_option = click.option(
    "--kv-dtype",
    type=click.Choice(get_args(KVDtype)),
    default="compute",
    show_default=True,
    help="As engine.kv_dtype.",
)
_SHARES = {"int4": 0.25 + 1 / 128, "nvfp4": 0.25 + 1 / 32}  # of the other kinds: a half


def packed_share(name: str, kind: str) -> float:
    """Return bytes of the tensor ``name`` as ``kind``, over those in bfloat16."""
    return _SHARES.get(kind, 0.5) if _is_packed(name, kind) else 1.0


def draw_packed(expr: WeightExpr, kind: str, device: torch.device) -> PackedWeight | Experts | None:
    """Draw a weight of unit gain for ``expr``: a matrix, or the matrices of experts [E, N, K].

    None if it stays bfloat16.
    """
    if not all(_is_packed(part.name, kind) for part in expr.parts):
        return None
    if len(expr.shape) == 2:
        return _draw(*expr.shape, kind, device)
    experts, rows, columns = expr.shape
    return as_experts(_draw(experts * rows, columns, kind, device), experts)


def _draw(rows: int, columns: int, kind: str, device: torch.device) -> PackedWeight:
    if kind == "int4":
        words = torch.randint(-(2**31), 2**31, (rows, columns // 8), device=device)
        scale = torch.full((rows, columns // 128), 0.217 * columns**-0.5, device=device)
        return Int4Weight(words.to(torch.int32), scale.to(torch.bfloat16), None)
    if kind == "nvfp4":
        words = torch.randint(-(2**31), 2**31, (rows, columns // 8), device=device)
        scale = torch.ones(rows, columns // 16, device=device).to(torch.float8_e4m3fn)
        row_scale = torch.full((rows, 1), columns**-0.5 / 2.9, device=device)
        return Nvfp4Weight(words.to(torch.int32), scale, row_scale)
    if kind.startswith("int8"):
        bytes_ = torch.randint(0, 256, (rows, columns), device=device, dtype=torch.uint8)
        scale = torch.full((rows, 1), columns**-0.5 / 74, device=device)
        return Int8Weight(bytes_, scale, int8_activations=kind == "int8-w8a8")
    codes = torch.empty(rows, columns, device=device, dtype=torch.bfloat16).normal_(std=16)
    grid = (rows // 128, columns // 128) if kind == "fp8-block" else (rows, 1)
    scale = torch.full(grid, columns**-0.5 / 16, device=device)
    return Fp8Weight(codes.to(torch.float8_e4m3fn), scale, fp8_activations=kind == "fp8-w8a8")


def _is_packed(name: str, kind: str) -> bool:
    """Return whether a checkpoint of ``kind`` has quantised the tensor ``name``.

    ``name``: of the checkpoint or of the graph.
    """
    if kind == "bfloat16" or "layers." not in name or "mid" in name:
        return False
    if ".mlp.experts." in name:
        return kind in _EXPERT_KINDS
    ends = (
        "_proj",
        "in_proj_qkv",
        "in_proj_z",
        "in_proj_qkvz",
    )  # b and a of linear attention stay bfloat16
    return name.removesuffix(".weight").endswith(ends)
