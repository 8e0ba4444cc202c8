"""Write new keys and values into the cache, then attend over the past and the masked tail.

Writes new token i of row b into slot ``past + (M - S) + i`` of the row (through its page table).
Then every new token attends over the row's slots: all of [0, past), and slot past + j if
``tree_mask[b, i, j]``. Rows i >= query_lengths are padding: they are written to page 0, which
belongs to no row, and their output is undefined.

Shapes: B rows, S new tokens per row, N = B * S, M masked tail, P pages per row, Hq / Hkv heads, D
head_dim. q T [N, Hq * D]; k, v T [N, Hkv * D]; k_cache, v_cache T [pages * page_size, Hkv, D],
updated in place; past_lengths, query_lengths int32 [B]; page_table int32 [B, P]; tree_mask bool
[B, S, M]; out T [N, Hq * D].

The form ``fp8`` has caches of e4m3 numbers as uint8 (for TensorRT as int32, four in one:
``graph/word_states.py``). Their scales ``kv_scales`` are float32 [2, Hkv], of keys and of values,
by head (``graph/ops/kv_fp8.py``). Attention reads the cached values, also of new tokens. So results
do not depend on which tokens share a forward.

The forms ``window`` and ``anchor_window`` hide slots that are far away. ``window``: those that are
``window`` or more away from a token's own slot. ``anchor_window``: those below ``past - window``,
from all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trt_eagle3.graph.ops.kernel import AttentionPath, Kernel, KernelCall, Mask
from trt_eagle3.graph.ops.kv_fp8 import decode
from trt_eagle3.graph.ops.kv_rows import write_kv_rows
from trt_eagle3.graph.ops.op import Op
from trt_eagle3.graph.ops.tree_attention_lowering import LOWERINGS, LOWERINGS_17

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KERNEL", "TREE_ATTENTION", "tree_attention", "tree_attention_call"]

KERNEL = Kernel(
    name="tree_attention",
    params="TreeAttentionParams",
    doc="""Writes new token i of row b to its slot past + (M - S) + i, then attends over [0, past)
and the tail slots in tree_mask. Tokens i >= query_lengths[b] are padding: they write no cache, no
token attends to them, their output is 0. With TE3_MASK_CAUSAL token i attends to every slot up to
its own; tree_mask.data may be null, its shape is still read. From S = 256 on, rows of the batch may
share pages: each attends to what the others write. With kv_scales the caches hold e4m3 numbers.
Times their head's scale they are keys and values. New ones times the inverse scale, in float32, are
rounded to nearest even and clipped to 448.""",
    tensors={
        "q": "T [N, Hq * D]",
        "k": "T [N, Hkv * D]",
        "v": "T [N, Hkv * D]",
        "k_cache": "T or uint8 (e4m3) [slots, Hkv, D], updated in place",
        "v_cache": "T or uint8 (e4m3) [slots, Hkv, D], updated in place",
        "past_lengths": "int32 [B]",
        "query_lengths": "int32 [B]",
        "page_table": "int32 [B, P]",
        "tree_mask": "bool [B, S, M]",
        "kv_scales": "float32 [2, Hkv] of keys and values: FP8 caches; or null data",
        "out": "T [N, Hq * D]",
    },
    writes=("k_cache", "v_cache", "out"),
    scalars={
        "page_size": (int, ""),
        "scale": (float, ""),
        "mask": (Mask, ""),
        "path": (AttentionPath, "only for tests and measurements, as num_splits"),
        "num_splits": (int, "0: chosen from the shapes"),
        "prefetch_safe": (
            int,
            "1: caches, page_table, lengths are prefetch-safe (te3_linear_args)",
        ),
        "window": (int, "hides slots that are this far from a token's own, or farther; 0: none"),
        "anchor_window": (int, "hides slots below past - anchor_window; 0: none"),
    },
    sizes="""
    int32_t batch;
    int32_t num_new;        // S
    int32_t tail;           // M
    int32_t pages_per_row;  // P
    int32_t page_shift;     // log2 of page_size, or -1 when it is no power of two
    int32_t num_heads;
    int32_t num_kv_heads;
    uint32_t group_inverse;  // row / (Hq / Hkv) as a product: ceil(2^32 / ratio), 0 where it is 1
    int32_t head_dim;
    DType dtype;
    int32_t written;  // set by the launcher: the cache already has the new tokens
    """,
    workspace="""Bytes of device memory, aligned to 16, that te3_tree_attention needs besides its
tensors; often 0. It depends on shapes and the device, not on lengths. Its contents are not kept
between launches.""",
)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    past_lengths: Tensor,
    query_lengths: Tensor,
    page_table: Tensor,
    tree_mask: Tensor,
    kv_scales: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    page_size: int,
    scale: float,
    window: int = 0,
    anchor_window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write k, v into their cache slots, in place, and attend over past and tail.

    ``window``, ``anchor_window``: 0 for the other forms.
    """
    import torch
    from torch.nn import functional

    batch, new, tail = tree_mask.shape
    device = q.device
    write_kv_rows(
        (k, v),
        (k_cache, v_cache),
        past_lengths,
        query_lengths,
        page_table,
        kv_scales,
        num_new=new,
        tail=tail,
        page_size=page_size,
    )
    slots = (page_table.long() * page_size)[..., None] + torch.arange(page_size, device=device)
    slots = slots.flatten(1)
    behind = torch.arange(slots.shape[1], device=device) - past_lengths.long()[:, None]
    shown = tree_mask.gather(2, behind.clamp(0, tail - 1)[:, None].expand(-1, new, -1))
    seen = (behind < 0)[:, None] | (shown & (behind < tail)[:, None])
    if window:
        own = torch.arange(tail - new, tail, device=device)[:, None]
        seen &= (own - behind[:, None]).abs() < window
    if anchor_window:
        seen &= (behind >= -anchor_window)[:, None]
    context = [cache[slots] for cache in (k_cache, v_cache)]
    if kv_scales is not None:
        context = [decode(x, sc, q.dtype) for x, sc in zip(context, kv_scales, strict=True)]
    keys, values = (x.transpose(1, 2) for x in context)
    by_head = q.view(batch, new, num_heads, k_cache.shape[-1]).transpose(1, 2)
    grouped = num_heads != num_kv_heads
    mixed = functional.scaled_dot_product_attention(
        by_head, keys, values, attn_mask=seen[:, None], scale=scale, enable_gqa=grouped
    )
    return mixed.transpose(1, 2).reshape(batch * new, -1), k_cache, v_cache


def tree_attention_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    past_lengths: Tensor,
    query_lengths: Tensor,
    page_table: Tensor,
    tree_mask: Tensor | None,
    *,
    page_size: int,
    scale: float,
    kv_scales: Tensor | None = None,
    tail: int | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    path: AttentionPath = AttentionPath.AUTO,
    num_splits: int = 0,
    prefetch_safe: bool = False,
    window: int = 0,
    anchor_window: int = 0,
) -> KernelCall[Tensor]:
    """Build the kernel call that writes the new tokens and attends over past and masked tail.

    Args:
        q, k, v: T [N, Hq * D], [N, Hkv * D], [N, Hkv * D].
        k_cache, v_cache: T [slots, Hkv, D], updated in place.
        past_lengths, query_lengths: int32 [B].
        page_table: int32 [B, P].
        tree_mask: bool [B, S, M]. None is the causal mask: token i attends to slots up to its own.
        kv_scales: float32 [2, Hkv], for caches of e4m3 numbers, as uint8.
        tail: M, only for the causal mask; S if not given.
        workspace: uint8, for the splits; allocated if needed and not given.
        prefetch_safe: caches, page table and lengths are older than any launch that may still run
            (see ``linear``).
        window, anchor_window: as for ``tree_attention``.
    Returns:
        T [N, Hq * D]; rows of padding tokens (i >= query_lengths[b]) are 0 and write no cache.
    Raises:
        ValueError: a tensor does not fit; the message names it.
        NotImplementedError: no kernel computes this on this device.
    """
    import torch

    out = torch.empty_like(q) if out is None else out
    mask = Mask.TREE
    if tree_mask is None:
        mask, batch = Mask.CAUSAL, past_lengths.shape[0]
        seq = q.shape[0] // max(batch, 1)
        shape = (batch, seq, seq if tail is None else tail)
        tree_mask = torch.empty(shape, dtype=torch.bool, device="meta")
    caches, lengths = (k_cache, v_cache), (past_lengths, query_lengths)
    inputs = (q, k, v, *caches, *lengths, page_table, tree_mask, kv_scales, out)
    tensors = dict(zip(KERNEL.tensors, inputs, strict=True))
    values = (page_size, scale, mask, path, num_splits, prefetch_safe, window, anchor_window)
    scalars = dict(zip(KERNEL.scalars, values, strict=True))
    return KernelCall(KERNEL, tensors, scalars, out, workspace)


def _node_call(
    *inputs: Tensor,
    page_size: int,
    scale: float,
    window: int = 0,
    anchor_window: int = 0,
    **geometry: int,
) -> KernelCall[tuple[Tensor, Tensor, Tensor]]:
    """Build the call of a node. The tensors' shapes already have the geometry (head counts)."""
    del geometry
    # prefetch_safe: a graph never writes the page table, and writes a layer's cache only in that
    # layer's own launches. If there are several, each writes pages that no other one reads.
    scales = inputs[9] if len(inputs) > 9 else None
    call = tree_attention_call(
        *inputs[:9],
        kv_scales=scales,
        page_size=page_size,
        scale=scale,
        prefetch_safe=True,
        window=window,
        anchor_window=anchor_window,
    )
    return KernelCall(KERNEL, call.tensors, call.scalars, (call.result, inputs[3], inputs[4]))


_FLOAT8E4M3FN = 17  # of onnx.TensorProto.DataType


def _plugin_values(inputs: Sequence[int], outputs: Sequence[int]) -> Mapping[str, int]:
    """Return ``kv_type``, the type of the numbers in caches that do not have type T."""
    del outputs
    return {"kv_type": _FLOAT8E4M3FN} if len(inputs) > len(_INPUTS) else {}


_INPUTS = tuple(KERNEL.tensors)[:-2]
_OUTPUTS = ("out", "k_cache_out", "v_cache_out")
_ATTRIBUTES = ("num_heads", "num_kv_heads", "page_size", "scale")
_WINDOWS = ("window", "anchor_window")

TREE_ATTENTION = Op(
    inputs={"": _INPUTS, "fp8": (*_INPUTS, "kv_scales"), **dict.fromkeys(_WINDOWS, _INPUTS)},
    outputs=dict.fromkeys(("", "fp8", *_WINDOWS), _OUTPUTS),
    attributes={
        **dict.fromkeys(("", "fp8"), _ATTRIBUTES),
        **{form: (*_ATTRIBUTES, form) for form in _WINDOWS},
    },
    float_attributes=("scale",),
    types={
        **dict.fromkeys(("past_lengths", "query_lengths", "page_table"), "int32"),
        **dict.fromkeys(("k_cache", "v_cache", "k_cache_out", "v_cache_out"), "C"),
        "tree_mask": "bool",
        "kv_scales": "float32",
    },
    lowering=LOWERINGS,
    lowering_17=LOWERINGS_17,
    torch_function=tree_attention,
    kernel=KERNEL,
    kernel_call=_node_call,
    plugin="TreeAttention",
    plugin_attributes=("prefetch_safe", "kv_type"),
    plugin_values=_plugin_values,
)
