"""Reference lowerings of ``TreeAttention``, in opset 24 and 17, and of its other forms."""

from __future__ import annotations

from trt_eagle3.graph.ops.kv_fp8 import decode_lowering, encode_lowering

__all__ = ["LOWERINGS", "LOWERINGS_17"]

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


def _with_fp8_caches(body: str) -> str:
    """Encode what ``body`` writes to the caches, and decode what it reads from them."""
    for kind, name in enumerate("kv"):
        body = _replaced(
            body,
            f"{name}_rows = Reshape ({name}, rows_shape)",
            f"{name}_typed = Reshape ({name}, rows_shape)"
            + encode_lowering(f"{name}_typed", f"{name}_rows", kind),
        )
        body = _replaced(
            body,
            f"{name}_context = Gather <axis = 0> ({name}_cache_out, context)",
            f"{name}_codes = Gather <axis = 0> ({name}_cache_out, context)"
            + decode_lowering(f"{name}_codes", f"{name}_context", kind, like=name),
        )
    return body


def _replaced(body: str, line: str, lines: str) -> str:
    assert body.count(line) == 1, f"a lowering without {line!r}"
    return body.replace(line, lines)


def _with_window(body: str, *, by_anchor: bool) -> str:
    """Hide the slots that are ``window`` or more away from a row's own; ``by_anchor``: the slots
    below ``past - window``, from all rows.
    """
    distance = (
        """
    behind_anchor = Sub (past, position)
    one_less = Constant <value_int = 1> ()
    behind_row = Sub (behind_anchor, one_less)
    distance_axis = Constant <value_ints = [1]> ()
    distance = Unsqueeze (behind_row, distance_axis)
    """
        if by_anchor
        else """
    distance_axis = Constant <value_ints = [2]> ()
    own_slot = Unsqueeze (wanted, distance_axis)
    apart = Sub (own_slot, position)
    distance = Abs (apart)
    """
    )
    return _replaced(
        body,
        "seen = Or (seen_tail, is_past_3d)",
        f"""{distance}
    window = Constant <value_int: int = @{"anchor_window" if by_anchor else "window"}> ()
    is_near = Less (distance, window)
    shown_at_all = Or (seen_tail, is_past_3d)
    seen = And (shown_at_all, is_near)
    """,
    )


def _forms(body: str) -> dict[str, str]:
    return {
        "": body,
        "fp8": _with_fp8_caches(body),
        "window": _with_window(body, by_anchor=False),
        "anchor_window": _with_window(body, by_anchor=True),
    }


LOWERINGS = _forms(_LOWERING)
LOWERINGS_17 = _forms(_LOWERING_17)
"""Form -> lowering."""
