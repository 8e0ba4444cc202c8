"""Write new keys and values into the cache, then attend over the past and the masked tail.

Writes new token i of row b into slot ``past + (M - S) + i`` of the row (through its page table),
then attends from every new token over the row's slots: all of [0, past), and slot past + j where
``tree_mask[b, i, j]``. Rows i >= query_lengths are padding: they write to page 0, which no row
owns, and their output means nothing.

Shapes: B rows, S new tokens per row, N = B * S, M masked tail, P pages per row, Hq / Hkv heads, D
head_dim. q T [N, Hq * D]; k, v T [N, Hkv * D]; k_cache, v_cache T [pages * page_size, Hkv, D],
updated in place; past_lengths, query_lengths int32 [B]; page_table int32 [B, P]; tree_mask bool
[B, S, M]; out T [N, Hq * D].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.graph.ops.kernel import AttentionPath, Kernel, KernelCall, Mask
from trt_eagle3.graph.ops.op import Op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KERNEL", "TREE_ATTENTION", "tree_attention", "tree_attention_call"]

KERNEL = Kernel(
    name="tree_attention",
    params="TreeAttentionParams",
    doc="""Writes new token i of row b to its slot past + (M - S) + i, then attends over [0, past)
and the tail slots that tree_mask shows. Tokens i >= query_lengths[b] are padding: they write no
cache, nobody sees them, their output is 0. With TE3_MASK_CAUSAL token i sees every slot up to its
own; tree_mask.data may be null, its shape is still read. From S = 256 on rows of the batch may
share pages: each sees what the others write.""",
    tensors={
        "q": "T [N, Hq * D]",
        "k": "T [N, Hkv * D]",
        "v": "T [N, Hkv * D]",
        "k_cache": "T [slots, Hkv, D], updated in place",
        "v_cache": "T [slots, Hkv, D], updated in place",
        "past_lengths": "int32 [B]",
        "query_lengths": "int32 [B]",
        "page_table": "int32 [B, P]",
        "tree_mask": "bool [B, S, M]",
        "out": "T [N, Hq * D]",
    },
    writes=("k_cache", "v_cache", "out"),
    scalars={
        "page_size": (int, ""),
        "scale": (float, ""),
        "mask": (Mask, ""),
        "path": (AttentionPath, "tests and measurements alone set this and num_splits"),
        "num_splits": (int, "0: chosen from the shapes"),
        "prefetch_safe": (
            int,
            "1: caches, page_table, lengths are prefetch-safe (te3_linear_args)",
        ),
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
    int32_t written;  // set by the launcher: the new tokens are in the cache already
    """,
    workspace="""Bytes of device memory, aligned to 16, that te3_tree_attention wants beside its
tensors; often 0. Depends on shapes and the device, not on lengths. Nothing in it outlives a
launch.""",
)

_LOWERING = """
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    first = Constant <value_ints = [0]> ()
    last = Constant <value_ints = [1]> ()
    minus_one = Constant <value_ints = [-1]> ()
    page = Constant <value_int: int = @page_size> ()
    past_1d = Cast <to = 7> (past_lengths)
    past = Unsqueeze (past_1d, last)
    queries_1d = Cast <to = 7> (query_lengths)
    queries = Unsqueeze (queries_1d, last)
    pages = Cast <to = 7> (page_table)
    mask_shape = Shape (tree_mask)
    new_1d = Shape <start = 1, end = 2> (tree_mask)
    tail_1d = Shape <start = 2, end = 3> (tree_mask)
    pages_1d = Shape <start = 1, end = 2> (page_table)
    new = Squeeze (new_1d)
    tail = Squeeze (tail_1d)
    num_pages = Squeeze (pages_1d)
    capacity = Mul (num_pages, page)
    token = Range (zero, new, one)
    ahead = Sub (tail, new)
    start = Add (past, ahead)
    wanted = Add (start, token)
    last_slot = Sub (capacity, one)
    place = Min (wanted, last_slot)
    page_index = Div (place, page)
    page_offset = Mod (place, page)
    page_id = GatherElements <axis = 1> (pages, page_index)
    page_start = Mul (page_id, page)
    slot = Add (page_start, page_offset)
    is_real = Less (token, queries)
    safe_slot = Where (is_real, slot, zero)
    column = Constant <value_ints = [-1, 1]> ()
    slots = Reshape (safe_slot, column)
    cache_shape = Shape (k_cache)
    row_shape = Shape <start = 1> (k_cache)
    rows_shape = Concat <axis = 0> (minus_one, row_shape)
    k_rows = Reshape (k, rows_shape)
    v_rows = Reshape (v, rows_shape)
    k_cache_out = ScatterND (k_cache, slots, k_rows)
    v_cache_out = ScatterND (v_cache, slots, v_rows)
    in_page = Range (zero, page, one)
    column_3d = Constant <value_ints = [2]> ()
    pages_3d = Unsqueeze (pages, column_3d)
    page_starts = Mul (pages_3d, page)
    context_3d = Add (page_starts, in_page)
    keep_batch = Constant <value_ints = [0, -1]> ()
    context = Reshape (context_3d, keep_batch)
    k_context = Gather <axis = 0> (k_cache_out, context)
    v_context = Gather <axis = 0> (v_cache_out, context)
    merge_heads = Constant <value_ints = [0, 0, -1]> ()
    k_3d = Reshape (k_context, merge_heads)
    v_3d = Reshape (v_context, merge_heads)
    position = Range (zero, capacity, one)
    tail_index = Sub (position, past)
    is_past = Less (tail_index, zero)
    last_tail = Sub (tail, one)
    tail_low = Max (tail_index, zero)
    tail_column = Min (tail_low, last_tail)
    middle = Constant <value_ints = [1]> ()
    tail_column_3d = Unsqueeze (tail_column, middle)
    capacity_1d = Reshape (capacity, minus_one)
    batch_new = Slice (mask_shape, first, column_3d)
    full_shape = Concat <axis = 0> (batch_new, capacity_1d)
    tail_columns = Expand (tail_column_3d, full_shape)
    in_tree = GatherElements <axis = 2> (tree_mask, tail_columns)
    is_tail_2d = Less (tail_index, tail)
    is_tail = Unsqueeze (is_tail_2d, middle)
    seen_tail = And (in_tree, is_tail)
    is_past_3d = Unsqueeze (is_past, middle)
    seen = Or (seen_tail, is_past_3d)
    seen_4d = Unsqueeze (seen, middle)
    q_shape = Concat <axis = 0> (batch_new, minus_one)
    q_3d = Reshape (q, q_shape)
    out_3d = Attention <
        q_num_heads: int = @num_heads,
        kv_num_heads: int = @num_kv_heads,
        scale: float = @scale
    > (q_3d, k_3d, v_3d, seen_4d)
    out_width = Shape <start = 2> (out_3d)
    out_shape = Concat <axis = 0> (minus_one, out_width)
    out = Reshape (out_3d, out_shape)
"""

_LOWERING_17 = """
    zero = Constant <value_int = 0> ()
    unit = Constant <value_int = 1> ()
    two = Constant <value_int = 2> ()
    one = Constant <value_ints = [1]> ()
    any = Constant <value_ints = [-1]> ()
    axis_1 = Constant <value_ints = [1]> ()
    axis_2 = Constant <value_ints = [2]> ()
    axes_12 = Constant <value_ints = [1, 2]> ()
    page = Constant <value_int: int = @page_size> ()
    num_q = Constant <value_int: int = @num_heads> ()
    num_kv = Constant <value_int: int = @num_kv_heads> ()
    past_1d = Cast <to = 7> (past_lengths)
    past = Unsqueeze (past_1d, axis_1)
    queries_1d = Cast <to = 7> (query_lengths)
    queries = Unsqueeze (queries_1d, axis_1)
    pages = Cast <to = 7> (page_table)
    mask_shape = Shape (tree_mask)
    new = Gather <axis = 0> (mask_shape, unit)
    tail = Gather <axis = 0> (mask_shape, two)
    table_shape = Shape (page_table)
    num_pages = Gather <axis = 0> (table_shape, unit)
    capacity = Mul (num_pages, page)
    batch_new_index = Constant <value_ints = [0, 1]> ()
    batch_new = Gather <axis = 0> (mask_shape, batch_new_index)
    token = Range (zero, new, unit)
    ahead = Sub (tail, new)
    start = Add (past, ahead)
    wanted = Add (start, token)
    last_slot = Sub (capacity, unit)
    place = Min (wanted, last_slot)
    page_index = Div (place, page)
    page_base = Mul (page_index, page)
    page_offset = Sub (place, page_base)
    page_id = GatherElements <axis = 1> (pages, page_index)
    page_start = Mul (page_id, page)
    slot = Add (page_start, page_offset)
    is_real = Less (token, queries)
    safe_slot = Where (is_real, slot, zero)
    column = Constant <value_ints = [-1, 1]> ()
    slots = Reshape (safe_slot, column)
    cache_shape = Shape (k_cache)
    heads_dim_index = Constant <value_ints = [1, 2]> ()
    heads_dim = Gather <axis = 0> (cache_shape, heads_dim_index)
    rows_shape = Concat <axis = 0> (any, heads_dim)
    k_rows = Reshape (k, rows_shape)
    v_rows = Reshape (v, rows_shape)
    k_cache_out = ScatterND (k_cache, slots, k_rows)
    v_cache_out = ScatterND (v_cache, slots, v_rows)
    in_page = Range (zero, page, unit)
    pages_3d = Unsqueeze (pages, axis_2)
    page_starts = Mul (pages_3d, page)
    context_3d = Add (page_starts, in_page)
    keep_batch = Constant <value_ints = [0, -1]> ()
    context = Reshape (context_3d, keep_batch)
    k_context = Gather <axis = 0> (k_cache_out, context)
    v_context = Gather <axis = 0> (v_cache_out, context)
    k_columns = Transpose <perm = [0, 2, 3, 1]> (k_context)
    v_by_head = Transpose <perm = [0, 2, 1, 3]> (v_context)
    position = Range (zero, capacity, unit)
    tail_index = Sub (position, past)
    is_past = Less (tail_index, zero)
    last_tail = Sub (tail, unit)
    tail_low = Max (tail_index, zero)
    tail_column = Min (tail_low, last_tail)
    tail_column_3d = Unsqueeze (tail_column, axis_1)
    capacity_1d = Reshape (capacity, any)
    full_shape = Concat <axis = 0> (batch_new, capacity_1d)
    tail_columns = Expand (tail_column_3d, full_shape)
    shown = Cast <to = 6> (tree_mask)
    in_tree_int = GatherElements <axis = 2> (shown, tail_columns)
    in_tree = Cast <to = 9> (in_tree_int)
    is_tail_2d = Less (tail_index, tail)
    is_tail = Unsqueeze (is_tail_2d, axis_1)
    seen_tail = And (in_tree, is_tail)
    is_past_3d = Unsqueeze (is_past, axis_1)
    seen = Or (seen_tail, is_past_3d)
    seen_5d = Unsqueeze (seen, axes_12)
    group = Div (num_q, num_kv)
    group_1d = Reshape (group, any)
    kv_1d = Reshape (num_kv, any)
    dim_index = Constant <value_ints = [2]> ()
    dim_1d = Gather <axis = 0> (cache_shape, dim_index)
    q_shape = Concat <axis = 0> (batch_new, kv_1d, group_1d, dim_1d)
    q_5d = Reshape (q, q_shape)
    q_by_head = Transpose <perm = [0, 2, 3, 1, 4]> (q_5d)
    keep_two = Constant <value_ints = [0, 0]> ()
    joined_shape = Concat <axis = 0> (keep_two, any, dim_1d)
    q_joined = Reshape (q_by_head, joined_shape)
    scores_joined = MatMul (q_joined, k_columns)
    scores_shape = Concat <axis = 0> (keep_two, group_1d, any, capacity_1d)
    scores_5d = Reshape (scores_joined, scores_shape)
    factor_f32 = Constant <value_float: float = @scale> ()
    factor = Cast <to = TYPE> (factor_f32)
    scaled = Mul (scores_5d, factor)
    never_f32 = Constant <value_float = -30000.0> ()
    never = Cast <to = TYPE> (never_f32)
    masked = Where (seen_5d, scaled, never)
    weights = Softmax <axis = -1> (masked)
    weights_shape = Concat <axis = 0> (keep_two, any, capacity_1d)
    weights_joined = Reshape (weights, weights_shape)
    mixed_joined = MatMul (weights_joined, v_by_head)
    mixed_shape = Concat <axis = 0> (keep_two, group_1d, any, dim_1d)
    mixed = Reshape (mixed_joined, mixed_shape)
    by_row = Transpose <perm = [0, 3, 1, 2, 4]> (mixed)
    q_width = Mul (kv_1d, group_1d)
    width = Mul (q_width, dim_1d)
    out_shape = Concat <axis = 0> (any, width)
    out = Reshape (by_row, out_shape)
"""


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
    *,
    num_heads: int,
    num_kv_heads: int,
    page_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write k, v into their slots of the caches, in place, and attend over past and tail."""
    import torch
    from torch.nn import functional

    batch, new, tail = tree_mask.shape
    device = q.device
    slots = (page_table.long() * page_size)[..., None] + torch.arange(page_size, device=device)
    slots = slots.flatten(1)
    token = torch.arange(new, device=device)
    row = past_lengths.long()[:, None] + (tail - new) + token
    own = slots.gather(1, row.clamp(max=slots.shape[1] - 1))
    own = torch.where(token < query_lengths[:, None], own, 0).flatten()
    dim = k_cache.shape[-1]
    k_cache[own] = k.view(-1, num_kv_heads, dim)
    v_cache[own] = v.view(-1, num_kv_heads, dim)
    behind = torch.arange(slots.shape[1], device=device) - past_lengths.long()[:, None]
    shown = tree_mask.gather(2, behind.clamp(0, tail - 1)[:, None].expand(-1, new, -1))
    seen = (behind < 0)[:, None] | (shown & (behind < tail)[:, None])
    keys, values = (cache[slots].transpose(1, 2) for cache in (k_cache, v_cache))
    by_head = q.view(batch, new, num_heads, dim).transpose(1, 2)
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
    tail: int | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    path: AttentionPath = AttentionPath.AUTO,
    num_splits: int = 0,
    prefetch_safe: bool = False,
) -> KernelCall[Tensor]:
    """Write the new tokens into the cache, then attend from each over its past and the tail that
    the mask shows.

    Args:
        q, k, v: T [N, Hq * D], [N, Hkv * D], [N, Hkv * D].
        k_cache, v_cache: T [slots, Hkv, D], updated in place.
        past_lengths, query_lengths: int32 [B]; page_table: int32 [B, P].
        tree_mask: bool [B, S, M]; None is the causal mask: token i sees every slot up to its own.
        tail: M, for the causal mask alone; S when not given.
        workspace: uint8, for the splits; allocated when wanted and not given.
        prefetch_safe: caches, page table and lengths are older than any launch that may still run
            (see ``linear``).
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
    inputs = (q, k, v, k_cache, v_cache, past_lengths, query_lengths, page_table, tree_mask, out)
    tensors = dict(zip(KERNEL.tensors, inputs, strict=True))
    values = (page_size, scale, mask, path, num_splits, prefetch_safe)
    scalars = dict(zip(KERNEL.scalars, values, strict=True))
    return KernelCall(KERNEL, tensors, scalars, out, workspace)


def _node_call(
    *inputs: Tensor, page_size: int, scale: float, **geometry: int
) -> KernelCall[tuple[Tensor, Tensor, Tensor]]:
    """The call of a node; geometry (head counts) is in the tensors' shapes already."""
    del geometry
    # prefetch_safe: a graph writes a layer's cache and the page table nowhere but in that layer's
    # own launch
    call = tree_attention_call(*inputs, page_size=page_size, scale=scale, prefetch_safe=True)
    return KernelCall(KERNEL, call.tensors, call.scalars, (call.result, inputs[3], inputs[4]))


TREE_ATTENTION = Op(
    inputs={"": tuple(KERNEL.tensors)[:-1]},
    outputs={"": ("out", "k_cache_out", "v_cache_out")},
    attributes={"": ("num_heads", "num_kv_heads", "page_size", "scale")},
    float_attributes=("scale",),
    types={
        **dict.fromkeys(("past_lengths", "query_lengths", "page_table"), "int32"),
        "tree_mask": "bool",
    },
    lowering={"": _LOWERING},
    lowering_17={"": _LOWERING_17},
    torch_function=tree_attention,
    kernel=KERNEL,
    kernel_call=_node_call,
    plugin="TreeAttention",
    plugin_attributes=("prefetch_safe",),
)
