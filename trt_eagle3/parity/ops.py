"""What the references compute with: RMSNorm and rotary embedding from their equations, float32 products in full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["full_float32", "pair_axis", "rms_norm", "turn"]


@contextmanager
def full_float32() -> Iterator[None]:
    """Products of float32 tensors are computed in float32, whatever the process allows.

    On a GPU torch rounds the inputs of convolutions (a vision tower's patches) to TF32 unless told otherwise, and those
    of matrix products where it is told to: docs.pytorch.org, "TensorFloat-32 (TF32) on Ampere (and later) devices".
    """
    cudnn = torch.backends.cudnn
    convolutions, products = cudnn.allow_tf32, torch.get_float32_matmul_precision()
    cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        cudnn.allow_tf32 = convolutions
        torch.set_float32_matmul_precision(products)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """``x / sqrt(mean(x ** 2) + epsilon) * weight`` over the last axis, computed in ``dtype``."""
    x = x.to(dtype)
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.to(dtype)


def pair_axis(layout: str, sections: tuple[int, ...], num_pairs: int) -> list[int]:
    """Which position axis turns each pair: T (0), H (1) or W (2)."""
    if layout == "1d":
        return [0] * num_pairs
    t, h, w = sections
    if layout == "chunked":
        return [0] * t + [1] * h + [2] * w
    return [1 if i % 3 == 1 and i < 3 * h else 2 if i % 3 == 2 and i < 3 * w else 0 for i in range(num_pairs)]


def turn(x: Tensor, positions: Tensor, inv_freq: Tensor, axes: list[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """Rotate channels (i, i + D/2) of ``x [n, heads, D]`` by ``positions [3, n]``.

    The angle itself is a float32 product, as it is in transformers: at position 200000 that rounding is visible.
    """
    half = x.shape[-1] // 2
    chosen = torch.stack([positions[axis] for axis in axes], dim=-1)
    angles = (chosen.float() * inv_freq.float()).to(dtype)[:, None]
    low, high = x[..., :half].to(dtype), x[..., half:].to(dtype)
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=-1)
