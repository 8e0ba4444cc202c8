"""Write the keys and values of new tokens into their slots of a paged cache.

Shapes: B rows, S new tokens per row, N = B * S, M masked tail, P pages per row, Hkv heads, D
head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.graph.ops.kv_fp8 import encode

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["write_kv_rows"]


def write_kv_rows(
    new: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    past_lengths: Tensor,
    query_lengths: Tensor,
    page_table: Tensor,
    kv_scales: Tensor | None,
    *,
    num_new: int,
    tail: int,
    page_size: int,
) -> None:
    """Write new token i of row b to slot ``past + (tail - num_new) + i`` of that row.

    Padding, i >= query_lengths[b], is written to page 0, which belongs to no row.

    Args:
        new: keys and values, T [N, Hkv * D].
        caches: of keys and of values, T or uint8 (e4m3) [pages * page_size, Hkv, D]; updated.
        past_lengths, query_lengths: int32 [B].
        page_table: int32 [B, P].
        kv_scales: float32 [2, Hkv] if the caches hold e4m3 numbers.
    """
    import torch

    token = torch.arange(num_new, device=page_table.device)
    place = past_lengths.long()[:, None] + (tail - num_new) + token
    page = (place // page_size).clamp(max=page_table.shape[1] - 1)
    slots = page_table.gather(1, page).long() * page_size + place % page_size
    slots = torch.where(token < query_lengths[:, None], slots, 0).flatten()
    for kind, (x, cache) in enumerate(zip(new, caches, strict=True)):
        by_head = x.view(-1, *cache.shape[1:])
        rows = by_head if kv_scales is None else encode(by_head, kv_scales[kind])
        cache.index_copy_(0, slots, rows)
