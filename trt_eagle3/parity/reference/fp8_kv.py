"""FP8 keys and values by definition: the nearest e4m3 number; of two equally near, the even one.

Uses a table of all numbers, unlike the rest of this package. Shapes: B rows, S tokens, Hkv heads, D
head_dim.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from trt_eagle3.checkpoint.kv_scales import KVScales

__all__ = ["RoundedKV", "nearest_codes", "numbers_of"]


@cache
def _sizes() -> Tensor:
    """float64 [127]: numbers of the codes without a sign, ascending; code 127 is no number."""
    subnormal = [step / 512 for step in range(8)]
    normal = [(8 + step) * 2.0**power / 8 for power in range(-6, 9) for step in range(8)]
    return torch.tensor([*subnormal, *normal][:127], dtype=torch.float64)


def nearest_codes(x: Tensor, scales: Tensor) -> Tensor:
    """uint8 [..., Hkv, D]: codes of ``x`` over ``scales`` [Hkv]; saturates at the largest."""
    quotient = x.float() * (1 / scales.float())[:, None].to(x.device)
    size, sizes = quotient.abs().double(), _sizes().to(x.device)
    above = torch.searchsorted(sizes, size).clamp(max=126)
    below = (above - 1).clamp(min=0)
    far, near = sizes[above] - size, size - sizes[below]
    up = (far < near) | ((far == near) & (above % 2 == 0))
    code = torch.where(up, above, below)
    return (code + 128 * quotient.signbit()).to(torch.uint8)


def numbers_of(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., Hkv, D]: numbers of ``codes``; NaN for a code without a number."""
    sizes = torch.cat([_sizes(), torch.tensor([torch.nan], dtype=torch.float64)]).to(codes.device)
    value = sizes[(codes & 127).long()].float() * torch.where(codes > 127, -1.0, 1.0)
    return value * scales.float()[:, None].to(codes.device)


class RoundedKV:
    """Rounds keys and values as an FP8 cache does; passed to transformers' attention as a cache.

    The reference runs whole sequences, so nothing is kept between calls.
    """

    def __init__(self, scales: KVScales) -> None:
        self._scales = tuple(torch.tensor(s) for s in (scales.k, scales.v))

    def update(self, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return ``k`` and ``v`` [B, Hkv, S, D], rounded."""
        rounded = [_round(x, scales) for x, scales in zip((k, v), self._scales, strict=True)]
        return rounded[0], rounded[1]


def _round(x: Tensor, scales: Tensor) -> Tensor:
    by_token = x.transpose(1, 2)
    scales = scales.expand(by_token.shape[2])
    return numbers_of(nearest_codes(by_token, scales), scales).transpose(1, 2).to(x.dtype)
