"""Drawn quantised weights, their packed form, and their values in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.engine import capi
from trt_eagle3.engine.torch.packing import pack_fp8, pack_int4, pack_int8
from trt_eagle3.graph.formats.nvfp4 import E2M1

__all__ = ["KINDS", "PackedCase", "draw_weight", "with_zeros"]

KINDS = (
    "fp8 channel",
    "fp8 tensor",
    "fp8 block",
    "fp8 row block",
    "int8 channel",
    "int8 row block",
    "int4 32",
    "int4 64 zeros",
    "int4 128",
    "int4 128 zeros",
    "int4 32 zeros float16",
    "nvfp4",
)


@dataclass(frozen=True)
class PackedCase:
    """A weight [N, K]: its ``values`` in float64, and the calls of the kernels on it.

    Attributes:
        linear: (x, out, prefetch_safe) -> out. unpack: out -> out.
    """

    values: Tensor
    linear: Callable[[Tensor, Tensor, bool], Tensor]
    unpack: Callable[[Tensor], Tensor]


def draw_weight(kind: str, n: int, k: int, device: torch.device) -> PackedCase:
    """A weight with codes of the whole range, and scales that differ by 20."""
    torch.manual_seed(n + k)
    case = {"fp8": _fp8, "int8": _int8, "int4": _int4, "nvfp4": _nvfp4}[kind.split(maxsplit=1)[0]](
        kind, n, k, device
    )
    torch.cuda.synchronize()  # prefetch-safe
    return case


def _scales(rows: int, columns: int, device: torch.device) -> Tensor:
    scale = torch.rand(rows, columns, device=device) * 0.02 + 1e-3
    return with_zeros(scale) if columns > 1 else scale


def with_zeros(scale: Tensor) -> Tensor:
    """``scale`` [..., rows, columns] where some are 0, first and last ones too: whoever quantises a
    block of zeros may say so.
    """
    scale[..., ::3, ::5] = scale[..., 1::3, -1] = 0.0
    return scale


def _fp8(kind: str, n: int, k: int, device: torch.device) -> PackedCase:
    codes = (torch.randn(n, k, device=device) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    codes[:, ::17] = (codes[:, ::17].float() / 4096).to(codes.dtype)  # subnormals too
    rows = {"channel": n, "tensor": 1, "block": -(-n // 128), "row block": n}[kind[4:]]
    scale = _scales(rows, k // 128 if "block" in kind else 1, device)
    row = torch.arange(n, device=device) * (rows > 1) // (1 if rows == n else 128)
    column = torch.arange(k, device=device) // (128 if "block" in kind else k)
    values = codes.double() * scale.double()[row][:, column]
    packed = pack_fp8(codes)

    def linear(x: Tensor, out: Tensor, safe: bool) -> Tensor:
        return capi.linear_fp8(x, packed, scale, prefetch_safe=safe, out=out)

    return PackedCase(
        values, linear, lambda out: capi.unpack_fp8(packed, scale, out.dtype, out=out)
    )


def _int8(kind: str, n: int, k: int, device: torch.device) -> PackedCase:
    codes = torch.randint(0, 256, (n, k), device=device, dtype=torch.uint8)
    scale = _scales(n, k // 128 if "block" in kind else 1, device)
    column = torch.arange(k, device=device) // (128 if "block" in kind else k)
    values = (codes.double() - 128) * scale.double()[:, column]
    packed = pack_int8(codes)

    def linear(x: Tensor, out: Tensor, safe: bool) -> Tensor:
        return capi.linear_int8(x, packed, scale, prefetch_safe=safe, out=out)

    return PackedCase(
        values, linear, lambda out: capi.unpack_int8(packed, scale, out.dtype, out=out)
    )


def _int4(kind: str, n: int, k: int, device: torch.device) -> PackedCase:
    group = int(kind.split()[1])
    codes = torch.randint(0, 16, (n, k), device=device, dtype=torch.uint8)
    scale = _scales(n, k // group, device)
    scale = scale.to(torch.float16 if "float16" in kind else torch.bfloat16)
    zeros = torch.randint(0, 16, scale.shape, device=device, dtype=torch.uint8)
    given = zeros if "zeros" in kind else None
    column = torch.arange(k, device=device) // group
    zero = zeros.double()[:, column] if given is not None else 8.0
    values = (codes.double() - zero) * scale.double()[:, column]
    packed = pack_int4(codes)

    def linear(x: Tensor, out: Tensor, safe: bool) -> Tensor:
        return capi.linear_int4(x, packed, scale, given, prefetch_safe=safe, out=out)

    return PackedCase(
        values, linear, lambda out: capi.unpack_int4(packed, scale, given, out.dtype, out=out)
    )


def _nvfp4(_kind: str, n: int, k: int, device: torch.device) -> PackedCase:
    codes = torch.randint(0, 16, (n, k), device=device, dtype=torch.uint8)
    scale = (torch.rand(n, k // 16, device=device) * 100).to(torch.float8_e4m3fn)
    scale[:, ::5] = (scale[:, ::5].float() / 8192).to(scale.dtype)  # subnormals and zeros too
    row = _scales(n, 1, device)
    table = torch.tensor(E2M1, device=device, dtype=torch.float64)
    values = table[codes.int()] * scale.double().repeat_interleave(16, 1) * row.double()
    packed = pack_int4(codes)

    def linear(x: Tensor, out: Tensor, safe: bool) -> Tensor:
        return capi.linear_nvfp4(x, packed, scale, row, prefetch_safe=safe, out=out)

    return PackedCase(
        values, linear, lambda out: capi.unpack_nvfp4(packed, scale, row, out.dtype, out=out)
    )
