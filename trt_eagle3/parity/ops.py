"""Reference operations: RMSNorm and rotary embedding from their equations, float32 products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["full_float32", "pair_axis", "rms_norm", "turn"]


class _Products:
    """torch's older switch for matrix products, as an attribute."""

    precision = property(
        lambda _: torch.get_float32_matmul_precision(),
        lambda _, value: torch.set_float32_matmul_precision(value),
    )


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute products of float32 tensors in float32, whatever the process allows.

    On a GPU torch rounds the inputs of convolutions (a vision tower's patches) to TF32 by default.
    It rounds those of matrix products on request: docs.pytorch.org, "TensorFloat-32 (TF32) on
    Ampere (and later) devices".
    """
    switches = _switches()
    before = [getattr(part, name) for part, name, _ in switches]
    for part, name, exact in switches:
        setattr(part, name, exact)
    try:
        yield
    finally:
        for (part, name, _), value in zip(switches, before, strict=True):
            setattr(part, name, value)


def _switches() -> list[tuple[Any, str, object]]:
    """Return (object, attribute, value that allows no rounding) of each switch."""
    backends: Any = torch.backends
    older = [(backends.cudnn, "allow_tf32", False), (_Products(), "precision", "highest")]
    try:
        for part, name, _ in older:
            getattr(part, name)
    except RuntimeError:
        # torch 2.9 and later: the older switches raise once the process has used the newer ones
        parts = (
            backends.cudnn.conv,
            backends.cuda.matmul,
            backends.mkldnn.conv,
            backends.mkldnn.matmul,
        )
        return [(part, "fp32_precision", "ieee") for part in parts]
    return older


def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype = torch.float64
) -> Tensor:
    """``x / sqrt(mean(x ** 2) + epsilon) * weight`` over the last axis, computed in ``dtype``."""
    x = x.to(dtype)
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.to(dtype)


def pair_axis(layout: str, sections: tuple[int, ...], num_pairs: int) -> list[int]:
    """Return the position axis that rotates each pair: T (0), H (1) or W (2)."""
    if layout == "1d":
        return [0] * num_pairs
    t, h, w = sections
    if layout == "chunked":
        return [0] * t + [1] * h + [2] * w
    return [
        1 if i % 3 == 1 and i < 3 * h else 2 if i % 3 == 2 and i < 3 * w else 0
        for i in range(num_pairs)
    ]


def turn(
    x: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    axes: list[int],
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Rotate channels (i, i + D/2) of ``x [n, heads, D]`` by ``positions [3, n]``.

    The angle is a float32 product, as in transformers: at position 200000 that rounding is
    visible.
    """
    half = x.shape[-1] // 2
    chosen = torch.stack([positions[axis] for axis in axes], dim=-1)
    angles = (chosen.float() * inv_freq.float()).to(dtype)[:, None]
    low, high = x[..., :half].to(dtype), x[..., half:].to(dtype)
    return torch.cat(
        [low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=-1
    )
