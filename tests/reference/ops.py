"""Our three ops from their equations, in float64 and with plain loops.

Shapes: B rows, S new tokens per row, N = B * S, M masked tail, P pages per row, Hq / Hkv heads, D
head_dim, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trt_eagle3.parity.ops import rms_norm, turn


def qk_norm_mrope(
    qkv: Tensor,
    position_ids: Tensor,
    inv_freq: Tensor,
    axes: list[int],
    heads: tuple[int, int, int],
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [N, Hq * D], k and v [N, Hkv * D] of packed ``qkv``; ``heads`` = (Hq, Hkv, D); ``norms``
    = (q, k, epsilon).
    """
    num_heads, num_kv_heads, dim = heads
    n = qkv.shape[0]
    by_head = qkv.double().view(n, num_heads + 2 * num_kv_heads, dim)
    q, k, v = by_head.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], norms[2]), rms_norm(k, norms[1], norms[2])
    positions = position_ids.reshape(3, n)
    q, k = turn(q, positions, inv_freq, axes), turn(k, positions, inv_freq, axes)
    return q.flatten(1), k.flatten(1), v.flatten(1)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One token's heads ``q [Hq, D]`` over its visible ``k, v [n, Hkv, D]``."""
    group = q.shape[0] // k.shape[1]
    out = torch.empty_like(q)
    for head in range(q.shape[0]):
        keys, values = k[:, head // group], v[:, head // group]
        out[head] = (keys @ q[head] * scale).softmax(-1) @ values
    return out


def slot(table: list[int], row: int, page_size: int) -> int:
    """Cache slot of a sequence's row."""
    return table[row // page_size] * page_size + row % page_size


def tree_attention(
    inputs: dict[str, Tensor], page_size: int, scale: float
) -> tuple[Tensor, Tensor, Tensor, set[int]]:
    """``(out [B, S, Hq, D], k_cache, v_cache, slots written)``; rows of padding come out as NaN and
    write nothing.

    ``inputs`` are the op's by name, q, k and v as [B, S, heads, D].
    """
    q = inputs["q"].double()
    k_cache, v_cache = inputs["k_cache"].clone(), inputs["v_cache"].clone()
    mask = inputs["tree_mask"]
    num_rows, num_new, tail = mask.shape
    out = torch.full_like(q, torch.nan)
    written: set[int] = set()
    for b in range(num_rows):
        past, table = int(inputs["past_lengths"][b]), inputs["page_table"][b].tolist()
        real = int(inputs["query_lengths"][b])
        for i in range(real):
            place = slot(table, past + tail - num_new + i, page_size)
            k_cache[place], v_cache[place] = inputs["k"][b, i], inputs["v"][b, i]
            written.add(place)
        for i in range(real):
            seen = [*range(past), *(past + j for j in range(tail) if mask[b, i, j])]
            places = [slot(table, row, page_size) for row in seen]
            out[b, i] = attend(q[b, i], k_cache[places].double(), v_cache[places].double(), scale)
    return out, k_cache, v_cache, written
