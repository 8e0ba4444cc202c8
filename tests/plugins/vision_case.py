"""Cases of VisionAttention, and their answers in float64.

Shapes: n patches, F frames, H heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """``frames``: patches of each frame, some perhaps none."""

    frames: tuple[int, ...]
    heads: int = 2
    head_dim: int = 72
    dtype: torch.dtype = torch.bfloat16

    def of(self, dtype: torch.dtype) -> Case:
        return replace(self, dtype=dtype)

    def __str__(self) -> str:
        frames = (
            "x".join(map(str, self.frames))
            if len(self.frames) < 9
            else f"{len(self.frames)}_frames"
        )
        return f"{frames}-h{self.heads}-d{self.head_dim}-{str(self.dtype)[6:]}"


@dataclass(frozen=True)
class Inputs:
    """As ``capi.vision_attention`` takes them; rows and columns are drawn, not those of a grid."""

    qkv: Tensor
    rope_positions: Tensor
    inv_freq: Tensor
    pair_axis: Tensor
    frame_starts: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.qkv, self.rope_positions, self.inv_freq, self.pair_axis, self.frame_starts


def draw(case: Case, seed: int, device: torch.device | str) -> Inputs:
    """Random inputs; scores spread over several units, so that the softmax is no mean."""
    generator = torch.Generator().manual_seed(seed)
    patches, pairs = sum(case.frames), case.head_dim // 2
    qkv = torch.randn(patches, 3 * case.heads * case.head_dim, generator=generator)
    qkv[:, : case.heads * case.head_dim] *= 2
    quarter = 10000.0 ** -(torch.arange(0, pairs, 2).float() / pairs)[: (pairs + 1) // 2]
    starts = torch.tensor((0, *case.frames)).cumsum(0)
    return Inputs(
        qkv.to(case.dtype).to(device),
        torch.randint(0, 300, (2, patches), generator=generator, dtype=torch.int32).to(device),
        torch.cat([quarter, quarter])[:pairs].contiguous().to(device),
        (torch.arange(pairs) >= pairs // 2).int().to(device),
        starts.int().to(device),
    )


def reference(case: Case, x: Inputs) -> Tensor:
    """float64 [n, H * D]; q and k are rounded to T after the rotation, as the model rounds them."""
    q, k, v = x.qkv.double().view(-1, 3, case.heads, case.head_dim).unbind(1)
    positions = x.rope_positions.index_select(0, x.pair_axis.long())  # [D / 2, n]
    angles = (positions.T.float() * x.inv_freq).double()[:, None]

    def rotate(part: Tensor) -> Tensor:
        low, high = part.chunk(2, dim=-1)
        turned = (
            low * angles.cos() - high * angles.sin(),
            high * angles.cos() + low * angles.sin(),
        )
        return torch.cat(turned, dim=-1).to(case.dtype).double()

    q, k = rotate(q), rotate(k)
    out = torch.empty_like(v)
    start = 0
    for length in case.frames:
        rows = slice(start, start + length)
        scores = torch.einsum("qhd,khd->hqk", q[rows], k[rows]) * case.head_dim**-0.5
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v[rows])
        start += length
    return out.flatten(1)
