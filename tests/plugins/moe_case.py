"""Drawn mixtures of experts, their values in float64, and routings that are hard."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.plugins.packed_case import with_zeros
from trt_eagle3.engine.torch.moe import DenseExperts, Experts, Fp8Experts, Int4Experts
from trt_eagle3.engine.torch.packing import pack_fp8, pack_int4

__all__ = ["KINDS", "ROUTINGS", "MoeCase", "draw_experts", "draw_logits", "reference_moe"]

KINDS = (
    "dense",
    "fp8 channel",
    "fp8 block",
    "fp8 tensor",
    "int4 128",
    "int4 64 zeros",
    "int4 32",
    "int4 32 zeros float16",
)
ROUTINGS = ("random", "one expert", "ties", "few experts", "negative")


@dataclass(frozen=True)
class MoeCase:
    """Experts as the kernels take them, and their values in float64, [E, 2 I, H] and [E, H, I]."""

    gate_up: Experts
    down: Experts
    gate_up_values: Tensor
    down_values: Tensor


def draw_experts(
    kind: str, experts: int, hidden: int, width: int, dtype: torch.dtype, device: torch.device
) -> MoeCase:
    """Experts whose outputs are of about the size of their inputs."""
    gate_up, up_values = _draw(kind, experts, 2 * width, hidden, dtype, device)
    down, down_values = _draw(kind, experts, hidden, width, dtype, device)
    return MoeCase(gate_up, down, up_values, down_values)


def _draw(
    kind: str, e: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> tuple[Experts, Tensor]:
    if kind == "dense":
        weight = (torch.randn(e, n, k, device=device) * k**-0.5).to(dtype)
        return DenseExperts(weight), weight.double()
    if kind.startswith("fp8"):
        return _draw_fp8(kind, e, n, k, device)
    return _draw_int4(kind, e, n, k, device)


def _draw_fp8(kind: str, e: int, n: int, k: int, device: torch.device) -> tuple[Experts, Tensor]:
    codes = (torch.randn(e, n, k, device=device) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    rows = {"channel": n, "block": -(-n // 128), "tensor": 1}[kind[4:]]
    columns = k // 128 if "block" in kind else 1
    scale = (torch.rand(e, rows, columns, device=device) + 0.1) * (0.01 * k**-0.5)
    scale = with_zeros(scale) if columns > 1 else scale
    row = torch.arange(n, device=device) * rows // n if rows < n else torch.arange(n, device=device)
    row = torch.arange(n, device=device) // 128 if "block" in kind else row
    column = torch.arange(k, device=device) * columns // k
    values = codes.double() * scale.double()[:, row][:, :, column]
    packed = pack_fp8(codes.flatten(0, 1)).view(codes.shape)
    return Fp8Experts(packed, scale), values


def _draw_int4(kind: str, e: int, n: int, k: int, device: torch.device) -> tuple[Experts, Tensor]:
    group = int(kind.split()[1])
    codes = torch.randint(0, 16, (e, n, k), device=device, dtype=torch.uint8)
    scale = (torch.rand(e, n, k // group, device=device) + 0.1) * (0.2 * k**-0.5)
    scale = with_zeros(scale) if k > group else scale
    scale = scale.to(torch.float16 if "float16" in kind else torch.bfloat16)
    zeros = torch.randint(6, 11, scale.shape, device=device, dtype=torch.uint8)
    column = torch.arange(k, device=device) // group
    zero = zeros.double()[:, :, column] if "zeros" in kind else 8.0
    values = (codes.double() - zero) * scale.double()[:, :, column]
    packed = pack_int4(codes.flatten(0, 1)).view(e, n, k // 8)
    return Int4Experts(packed, scale, zeros if "zeros" in kind else None), values


def draw_logits(
    routing: str, rows: int, experts: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Router logits, T [rows, experts]."""
    logits = torch.randn(rows, experts, device=device)
    if routing == "one expert":
        logits[:, experts // 3] += 20
        logits[:, :2] += 10
    elif routing == "ties":
        logits = logits.mul(0.7).round()
    elif routing == "few experts":
        logits[:, ::3] -= 50
    elif routing == "negative":
        logits -= 200
    return logits.to(dtype)


def reference_moe(
    x: Tensor, logits: Tensor, case: MoeCase, top_k: int, renormalise: bool
) -> Tensor:
    """float64 [n, H]; of equal logits the first expert is chosen."""
    p = torch.softmax(logits.double(), -1)
    order = torch.sort(logits.double(), dim=-1, descending=True, stable=True).indices[:, :top_k]
    shares = p.gather(1, order)
    if renormalise:
        shares = shares / shares.sum(-1, keepdim=True)
    y = torch.zeros_like(x, dtype=torch.float64)
    for rank in range(top_k):
        for expert in order[:, rank].unique().tolist():
            rows = order[:, rank] == expert
            gate, up = (x[rows].double() @ case.gate_up_values[expert].T).chunk(2, -1)
            inner = gate * torch.sigmoid(gate) * up
            y[rows] += shares[rows, rank, None] * (inner @ case.down_values[expert].T)
    return y
