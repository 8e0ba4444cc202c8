"""Our op set. Each op shows its three faces side by side: schema, reference lowering, plugin name.

Shapes: B rows, S new tokens per row, N = B * S, M masked tail, P pages per row, Hq / Hkv heads, D
head_dim, H hidden; of the vision tower n patches, F frames, H heads. The reference lowerings are
ONNX functions in opset 24, so that any ONNX runtime that knows it can run our graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import onnx
from onnx import parser

__all__ = ["DOMAIN", "OPS", "OPSET", "Op", "reference_function"]

DOMAIN = "trt_eagle3"
OPSET = 24


@dataclass(frozen=True)
class Op:
    """One op.

    Attributes:
        inputs, outputs: names per overload ("" is the plain form).
        attributes: names of the required attributes per overload.
        lowering: text of the reference lowering per overload, in ONNX's textual syntax.
        plugin: the TensorRT plugin (and capi function) that computes it.
    """

    inputs: Mapping[str, tuple[str, ...]]
    outputs: Mapping[str, tuple[str, ...]]
    attributes: Mapping[str, tuple[str, ...]]
    lowering: Mapping[str, str]
    plugin: str


# y = RMSNorm(x [+ residual]) * weight, in float32 inside; sum = x + residual, in the input type.
#   x, residual: T [n, H]; weight: T [H]; y, sum: T [n, H]
_ADD_RMS_NORM = Op(
    inputs={"": ("x", "weight"), "residual": ("x", "weight", "residual")},
    outputs={"": ("y",), "residual": ("y", "sum")},
    attributes={"": ("epsilon",), "residual": ("epsilon",)},
    lowering={
        "": "y = RMSNormalization <axis = -1, epsilon: float = @epsilon> (x, weight)",
        "residual": """
            sum = Add (x, residual)
            y = RMSNormalization <axis = -1, epsilon: float = @epsilon> (sum, weight)
        """,
    },
    plugin="AddRmsNorm",
)

# Cuts the packed projection into q, k, v; normalises each head of q and k (overload "norm"); turns
# pair i of every head of q and k (channels i and i + D/2) by position_ids[pair_axis[i]] *
# inv_freq[i].
#   qkv: T [N, (Hq + 2 Hkv) * D]; position_ids: i32 [3, B, S]; inv_freq: f32 [D/2]; pair_axis: i32
# [D/2]
#   q_norm, k_norm: T [D]; q: T [N, Hq * D]; k, v: T [N, Hkv * D]
_CUT = """
            one = Constant <value_ints = [1]> ()
            num_q = Constant <value_int: int = @num_heads> ()
            num_kv = Constant <value_int: int = @num_kv_heads> ()
            dim = Constant <value_int: int = @head_dim> ()
            q_width_0d = Mul (num_q, dim)
            kv_width_0d = Mul (num_kv, dim)
            q_width = Reshape (q_width_0d, one)
            kv_width = Reshape (kv_width_0d, one)
            widths = Concat <axis = 0> (q_width, kv_width, kv_width)
            q_flat, k_flat, v = Split <axis = -1> (qkv, widths)
            axes_bs = Shape <start = 1> (position_ids)
"""
_NORM = """
            minus_one = Constant <value_ints = [-1]> ()
            dim_1d = Reshape (dim, one)
            by_head = Concat <axis = 0> (minus_one, dim_1d)
            q_rows = Reshape (q_flat, by_head)
            k_rows = Reshape (k_flat, by_head)
            q_normed = RMSNormalization <axis = -1, epsilon: float = @epsilon> (q_rows, q_norm)
            k_normed = RMSNormalization <axis = -1, epsilon: float = @epsilon> (k_rows, k_norm)
"""
_TURN = """
            pair_positions = Gather <axis = 0> (position_ids, pair_axis)
            positions = Transpose <perm = [1, 2, 0]> (pair_positions)
            positions_f32 = Cast <to = 1> (positions)
            angles = Mul (positions_f32, inv_freq)
            cos_f32 = Cos (angles)
            sin_f32 = Sin (angles)
            cos = CastLike (cos_f32, qkv)
            sin = CastLike (sin_f32, qkv)
            q_shape = Concat <axis = 0> (axes_bs, q_width)
            k_shape = Concat <axis = 0> (axes_bs, kv_width)
            q_bs = Reshape ({q}, q_shape)
            k_bs = Reshape ({k}, k_shape)
            q_turned = RotaryEmbedding <num_heads: int = @num_heads> (q_bs, cos, sin)
            k_turned = RotaryEmbedding <num_heads: int = @num_kv_heads> (k_bs, cos, sin)
            flat_minus_one = Constant <value_ints = [-1]> ()
            q_out_shape = Concat <axis = 0> (flat_minus_one, q_width)
            k_out_shape = Concat <axis = 0> (flat_minus_one, kv_width)
            q = Reshape (q_turned, q_out_shape)
            k = Reshape (k_turned, k_out_shape)
"""
_QK_NORM_MROPE = Op(
    inputs={
        "": ("qkv", "position_ids", "inv_freq", "pair_axis"),
        "norm": ("qkv", "position_ids", "inv_freq", "pair_axis", "q_norm", "k_norm"),
    },
    outputs={"": ("q", "k", "v"), "norm": ("q", "k", "v")},
    attributes={
        "": ("num_heads", "num_kv_heads", "head_dim"),
        "norm": ("num_heads", "num_kv_heads", "head_dim", "epsilon"),
    },
    lowering={
        "": _CUT + _TURN.format(q="q_flat", k="k_flat"),
        "norm": _CUT + _NORM + _TURN.format(q="q_normed", k="k_normed"),
    },
    plugin="QKNormMRope",
)

# Writes new token i of row b into slot past + (M - S) + i of the row (through its page table), then
# attends from every new token over the row's slots: all of [0, past), and slot past + j where
# tree_mask[b, i, j]. Rows i >= query_lengths
# are padding: they write to page 0, which no row owns, and their output means nothing.
#   q: T [N, Hq * D]; k, v: T [N, Hkv * D]; k_cache, v_cache: T [pages * page_size, Hkv, D], updated
# in place
#   past_lengths, query_lengths: i32 [B]; page_table: i32 [B, P]; tree_mask: bool [B, S, M]; out: T
# [N, Hq * D]
_TREE_ATTENTION = Op(
    inputs={
        "": (
            "q",
            "k",
            "v",
            "k_cache",
            "v_cache",
            "past_lengths",
            "query_lengths",
            "page_table",
            "tree_mask",
        )
    },
    outputs={"": ("out", "k_cache_out", "v_cache_out")},
    attributes={"": ("num_heads", "num_kv_heads", "page_size", "scale")},
    lowering={
        "": """
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
    },
    plugin="TreeAttention",
)

# out = silu(gate) * up, gate and up being the two halves of gate_up's columns.
#   gate_up: T [n, 2 W]; out: T [n, W]
_SILU_MUL = Op(
    inputs={"": ("gate_up",)},
    outputs={"": ("out",)},
    attributes={"": ()},
    lowering={
        "": """
            gate, up = Split <axis = -1, num_outputs = 2> (gate_up)
            opened = Sigmoid (gate)
            silu = Mul (gate, opened)
            out = Mul (silu, up)
        """
    },
    plugin="SiluMul",
)

# y = the rows of x that `rows` names, counted within each batch row: y[b R + r] = x[b S + rows[b,
# r]].
#   x: T [N, H]; rows: i32 [B, R]; y: T [B * R, H]
# One Gather would do, were it not that TensorRT 8.6 cannot build one beside plugins.
_PICK_ROWS = Op(
    inputs={"": ("x", "rows")},
    outputs={"": ("y",)},
    attributes={"": ()},
    lowering={
        "": """
            minus_one = Constant <value_ints = [-1]> ()
            last = Constant <value_ints = [-1]> ()
            batch = Shape <start = 0, end = 1> (rows)
            width = Shape <start = 1> (x)
            by_row_shape = Concat <axis = 0> (batch, minus_one, width)
            by_row = Reshape (x, by_row_shape)
            index_2d = Cast <to = 7> (rows)
            index = Unsqueeze (index_2d, last)
            picked = GatherND <batch_dims = 1> (by_row, index)
            flat_shape = Concat <axis = 0> (minus_one, width)
            y = Reshape (picked, flat_shape)
        """
    },
    plugin="PickRows",
)

# Turns pair i of every head of q and k (channels i and i + D/2) by rope_positions[pair_axis[i]] *
# inv_freq[i], in float32, then attends from each patch over its own frame: patches frame_starts[f]
# to frame_starts[f + 1] - 1.
#   qkv: T [n, 3 * H * D]; rope_positions: i32 [2, n]; inv_freq: f32 [D/2]; pair_axis: i32 [D/2]
#   frame_starts: i32 [F + 1], ascending from 0 to n; frames may be empty; out: T [n, H * D]
# The lowering goes through the queries in pieces of one frame whose scores take no more than 32
# MiB. (A sequence holds no bfloat16, so the pieces are float32.)
_VISION_ATTENTION = Op(
    inputs={"": ("qkv", "rope_positions", "inv_freq", "pair_axis", "frame_starts")},
    outputs={"": ("out",)},
    attributes={"": ("num_heads", "scale")},
    lowering={
        "": """
            zero = Constant <value_int = 0> ()
            first = Constant <value_ints = [0]> ()
            heads = Constant <value_int: int = @num_heads> ()
            total_1d = Shape <start = 0, end = 1> (qkv)
            total = Squeeze (total_1d)
            starts = Cast <to = 7> (frame_starts)

            q_flat, k_flat, v = Split <axis = -1, num_outputs = 3> (qkv)
            pair_positions = Gather <axis = 0> (rope_positions, pair_axis)
            positions = Transpose <perm = [1, 0]> (pair_positions)
            positions_f32 = Cast <to = 1> (positions)
            angles_2d = Mul (positions_f32, inv_freq)
            angles = Unsqueeze (angles_2d, first)
            cos = Cos (angles)
            sin = Sin (angles)
            q_f32 = Cast <to = 1> (q_flat)
            k_f32 = Cast <to = 1> (k_flat)
            q_3d = Unsqueeze (q_f32, first)
            k_3d = Unsqueeze (k_f32, first)
            q_turned_f32 = RotaryEmbedding <num_heads: int = @num_heads> (q_3d, cos, sin)
            k_turned_f32 = RotaryEmbedding <num_heads: int = @num_heads> (k_3d, cos, sin)
            q_turned = CastLike (q_turned_f32, qkv)
            k_turned = CastLike (k_turned_f32, qkv)
            v_3d = Unsqueeze (v, first)

            along = Constant <value_ints = [1]> ()
            budget = Constant <value_int = 8388608> ()
            least = Constant <value_int = 16> ()
            no_pieces = SequenceEmpty <dtype = 1> ()
            any = Greater (total, zero)
            no_limit = Constant <value_int = 9223372036854775807> ()
            last_position, pieces = Loop <
                body = piece (int64 step, bool go_on, int64 position, so_far) => (go, next, more) {
                    is_later = Greater (starts, position)
                    ends = Where (is_later, starts, total)
                    end = ReduceMin <keepdims = 0> (ends)
                    firsts = Where (is_later, zero, starts)
                    start = ReduceMax <keepdims = 0> (firsts)
                    length = Sub (end, start)
                    row_scores = Mul (length, heads)
                    fitting = Div (budget, row_scores)
                    rows = Max (fitting, least)
                    reach = Add (position, rows)
                    next = Min (reach, end)
                    position_1d = Reshape (position, along)
                    next_1d = Reshape (next, along)
                    start_1d = Reshape (start, along)
                    end_1d = Reshape (end, along)
                    q_rows = Slice (q_turned, position_1d, next_1d, along)
                    k_rows = Slice (k_turned, start_1d, end_1d, along)
                    v_rows = Slice (v_3d, start_1d, end_1d, along)
                    attended = Attention <
                        q_num_heads: int = @num_heads,
                        kv_num_heads: int = @num_heads,
                        scale: float = @scale
                    > (q_rows, k_rows, v_rows)
                    attended_f32 = Cast <to = 1> (attended)
                    more = SequenceInsert (so_far, attended_f32)
                    go = Less (next, total)
                }
            > (no_limit, any, zero, no_pieces)
            joined = ConcatFromSequence <axis = 1> (pieces)
            out_f32 = Squeeze (joined, first)
            out = CastLike (out_f32, qkv)
        """
    },
    plugin="VisionAttention",
)

OPS: Mapping[str, Op] = {
    "AddRmsNorm": _ADD_RMS_NORM,
    "QKNormMRope": _QK_NORM_MROPE,
    "TreeAttention": _TREE_ATTENTION,
    "SiluMul": _SILU_MUL,
    "PickRows": _PICK_ROWS,
    "VisionAttention": _VISION_ATTENTION,
}


@cache
def reference_function(op_type: str, overload: str) -> onnx.FunctionProto:
    """The reference lowering of one overload as an ONNX function."""
    op = OPS[op_type]
    attributes = f"<{', '.join(op.attributes[overload])}>" if op.attributes[overload] else ""
    text = f"""
        <domain: "{DOMAIN}", opset_import: ["" : {OPSET}]>
        {op_type} {attributes} ({", ".join(op.inputs[overload])})
        => ({", ".join(op.outputs[overload])}) {{ {op.lowering[overload]} }}
    """
    function = parser.parse_function(text)
    function.overload = overload
    return function
