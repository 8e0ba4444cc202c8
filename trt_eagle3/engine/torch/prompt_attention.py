"""Attention of a few rows of a prompt's chunk, over the keys and values of all rows.

Shapes: B sequences, S rows of each, R rows picked of each, P pages, Hq / Hkv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trt_eagle3.engine import capi
from trt_eagle3.graph.ops.kv_rows import write_kv_rows
from trt_eagle3.graph.ops.pick_rows import pick_rows
from trt_eagle3.graph.ops.tree_attention import tree_attention

__all__ = ["prompt_attention"]


class _Inputs(NamedTuple):
    """Inputs of ``TreeAttention`` with a lower-triangular mask; ``kv_scales``: of FP8 caches."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    past_lengths: Tensor
    query_lengths: Tensor
    page_table: Tensor
    tree_mask: Tensor
    kv_scales: Tensor | None = None


def prompt_attention(device: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return ``PromptAttention`` for ``device``: our kernel, or torch operations."""
    attend = _kernel if device == "cuda" and capi.available() else _stock

    def function(*inputs: Tensor, **geometry: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Take the inputs of ``TreeAttention`` and ``logit_rows [B, R]``; return ``[B * R, Hq *
        D]`` and the caches, to which all rows have been written.
        """
        new, rows = _Inputs(*inputs[:-1]), inputs[-1]
        _write(new, geometry["page_size"])
        return attend(_picked(new, rows), geometry), new.k_cache, new.v_cache

    return function


def _write(new: _Inputs, page_size: int) -> None:
    """Write ``k`` and ``v [B * S, Hkv * D]`` to their slots."""
    _, width, tail = new.tree_mask.shape
    write_kv_rows(
        (new.k, new.v),
        (new.k_cache, new.v_cache),
        new.past_lengths,
        new.query_lengths,
        new.page_table,
        new.kv_scales,
        num_new=width,
        tail=tail,
        page_size=page_size,
    )


def _picked(new: _Inputs, rows: Tensor) -> _Inputs:
    """Make B * R sequences of one new token, which attends to the tokens before it. Its key and
    value are written again.
    """
    _, width, tail = new.tree_mask.shape
    past = (new.past_lengths[:, None] + (tail - width) + rows).flatten().int()
    one = torch.ones_like(past)
    return new._replace(
        **{name: pick_rows(getattr(new, name), rows) for name in "qkv"},
        past_lengths=past,
        query_lengths=one,
        page_table=new.page_table.repeat_interleave(rows.shape[1], dim=0),
        tree_mask=one.bool()[:, None, None],
    )


def _kernel(new: _Inputs, geometry: dict[str, Any]) -> Tensor:
    # not prefetch_safe: the preceding launches have written the caches
    scalars = {name: geometry[name] for name in ("page_size", "scale")}
    return capi.tree_attention(*new[:8], None, kv_scales=new.kv_scales, **scalars)


def _stock(new: _Inputs, geometry: dict[str, Any]) -> Tensor:
    return tree_attention(*new, **geometry)[0]
