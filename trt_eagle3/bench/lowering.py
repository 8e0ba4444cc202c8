"""Our ops by standard operators of opset 17: what an engine without our plugins would run."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import inliner, parser
from onnx.reference import ReferenceEvaluator

from trt_eagle3.graph.ops import DOMAIN, OPS
from trt_eagle3.graph.trt_export import PLUGIN_OPSET

__all__ = ["lowered"]

_NORM = """
    {x}_f32 = Cast <to = 1> ({x})
    {x}_square = Mul ({x}_f32, {x}_f32)
    {x}_mean = ReduceMean <axes = [-1], keepdims = 1> ({x}_square)
    {x}_shifted = Add ({x}_mean, eps)
    {x}_root = Sqrt ({x}_shifted)
    {x}_unit = Div ({x}_f32, {x}_root)
    {x}_typed = Cast <to = TYPE> ({x}_unit)
    {y} = Mul ({x}_typed, {weight})
"""
_EPSILON = "eps = Constant <value_float: float = @epsilon> ()\n"
_ADD_RMS_NORM = {
    "": _EPSILON + _NORM.format(x="x", y="y", weight="weight"),
    "residual": _EPSILON
    + "sum = Add (x, residual)\n"
    + _NORM.format(x="sum", y="y", weight="weight"),
}

_CUT = """
    one = Constant <value_ints = [1]> ()
    any = Constant <value_ints = [-1]> ()
    num_q = Constant <value_int: int = @num_heads> ()
    num_kv = Constant <value_int: int = @num_kv_heads> ()
    dim = Constant <value_int: int = @head_dim> ()
    q_count = Reshape (num_q, one)
    kv_count = Reshape (num_kv, one)
    dim_1d = Reshape (dim, one)
    q_width = Mul (q_count, dim_1d)
    kv_width = Mul (kv_count, dim_1d)
    widths = Concat <axis = 0> (q_width, kv_width, kv_width)
    q_flat, k_flat, v = Split <axis = -1> (qkv, widths)
    two = Constant <value_ints = [2]> ()
    half_1d = Div (dim_1d, two)
    halves = Concat <axis = 0> (half_1d, half_1d)
    pair_positions = Gather <axis = 0> (position_ids, pair_axis)
    positions = Transpose <perm = [1, 2, 0]> (pair_positions)
    positions_f32 = Cast <to = 1> (positions)
    angles = Mul (positions_f32, inv_freq)
    row_shape = Concat <axis = 0> (any, one, half_1d)
    angle_rows = Reshape (angles, row_shape)
    cos_f32 = Cos (angle_rows)
    sin_f32 = Sin (angle_rows)
    cos = Cast <to = TYPE> (cos_f32)
    sin = Cast <to = TYPE> (sin_f32)
"""
_HEADS = """
    {p}_shape = Concat <axis = 0> (any, {heads}, dim_1d)
    {p}_heads = Reshape ({p}_flat, {p}_shape)
"""
_TURN = """
    {p}_low, {p}_high = Split <axis = -1> ({rows}, halves)
    {p}_low_cos = Mul ({p}_low, cos)
    {p}_high_sin = Mul ({p}_high, sin)
    {p}_high_cos = Mul ({p}_high, cos)
    {p}_low_sin = Mul ({p}_low, sin)
    {p}_left = Sub ({p}_low_cos, {p}_high_sin)
    {p}_right = Add ({p}_high_cos, {p}_low_sin)
    {p}_turned = Concat <axis = -1> ({p}_left, {p}_right)
    {p}_flat_shape = Concat <axis = 0> (any, {width})
    {p} = Reshape ({p}_turned, {p}_flat_shape)
"""
_Q, _K = (
    {"p": "q", "heads": "q_count", "width": "q_width"},
    {"p": "k", "heads": "kv_count", "width": "kv_width"},
)
_QK_NORM_MROPE = {
    "": _CUT
    + "".join(_HEADS.format(**s) + _TURN.format(rows=f"{s['p']}_heads", **s) for s in (_Q, _K)),
    "norm": _CUT
    + _EPSILON
    + "".join(
        _HEADS.format(**s)
        + _NORM.format(x=f"{s['p']}_heads", y=f"{s['p']}_normed", weight=f"{s['p']}_norm")
        + _TURN.format(rows=f"{s['p']}_normed", **s)
        for s in (_Q, _K)
    ),
}

_TREE_ATTENTION = {
    "": """
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
}
_SILU_MUL = {
    "": """
    gate, up = Split <axis = -1> (gate_up)
    opened = Sigmoid (gate)
    silu = Mul (gate, opened)
    out = Mul (silu, up)
"""
}
_PICK_ROWS = {
    "": """
    any = Constant <value_ints = [-1]> ()
    first = Constant <value_ints = [0]> ()
    last = Constant <value_ints = [1]> ()
    axis_2 = Constant <value_ints = [2]> ()
    rows_shape = Shape (rows)
    batch = Gather <axis = 0> (rows_shape, first)
    x_shape = Shape (x)
    width = Gather <axis = 0> (x_shape, last)
    by_row_shape = Concat <axis = 0> (batch, any, width)
    by_row = Reshape (x, by_row_shape)
    index_2d = Cast <to = 7> (rows)
    index = Unsqueeze (index_2d, axis_2)
    picked = GatherND <batch_dims = 1> (by_row, index)
    flat_shape = Concat <axis = 0> (any, width)
    y = Reshape (picked, flat_shape)
"""
}
# All patches at once, frames kept apart by a mask: what attention without a kernel of its own comes
# to.
_VISION_ATTENTION = {
    "": """
    zero = Constant <value_int = 0> ()
    unit = Constant <value_int = 1> ()
    any = Constant <value_ints = [-1]> ()
    axis_0 = Constant <value_ints = [0]> ()
    axis_1 = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    num = Constant <value_int: int = @num_heads> ()
    heads = Reshape (num, any)
    half = Shape (inv_freq)
    halves = Concat <axis = 0> (half, half)
    dim = Mul (half, two)
    width = Mul (heads, dim)
    widths = Concat <axis = 0> (width, width, width)
    q_flat, k_flat, v_flat = Split <axis = -1> (qkv, widths)
    rows_shape = Concat <axis = 0> (any, heads, dim)
    pair_positions = Gather <axis = 0> (rope_positions, pair_axis)
    positions = Transpose <perm = [1, 0]> (pair_positions)
    positions_f32 = Cast <to = 1> (positions)
    angles_2d = Mul (positions_f32, inv_freq)
    angles = Unsqueeze (angles_2d, axis_1)
    cos = Cos (angles)
    sin = Sin (angles)
"""
    + "".join(
        f"""
    {p}_rows = Reshape ({p}_flat, rows_shape)
    {p}_f32 = Cast <to = 1> ({p}_rows)
    {p}_low, {p}_high = Split <axis = -1> ({p}_f32, halves)
    {p}_low_cos = Mul ({p}_low, cos)
    {p}_high_sin = Mul ({p}_high, sin)
    {p}_high_cos = Mul ({p}_high, cos)
    {p}_low_sin = Mul ({p}_low, sin)
    {p}_left = Sub ({p}_low_cos, {p}_high_sin)
    {p}_right = Add ({p}_high_cos, {p}_low_sin)
    {p}_turned_f32 = Concat <axis = -1> ({p}_left, {p}_right)
    {p}_turned = Cast <to = TYPE> ({p}_turned_f32)
"""
        for p in "qk"
    )
    + """
    v_rows = Reshape (v_flat, rows_shape)
    q_by_head = Transpose <perm = [1, 0, 2]> (q_turned)
    k_columns = Transpose <perm = [1, 2, 0]> (k_turned)
    v_by_head = Transpose <perm = [1, 0, 2]> (v_rows)
    qkv_shape = Shape (qkv)
    total = Gather <axis = 0> (qkv_shape, zero)
    patch = Range (zero, total, unit)
    patch_column = Unsqueeze (patch, axis_1)
    starts = Cast <to = 7> (frame_starts)
    is_later = Greater (starts, patch_column)
    later = Cast <to = 7> (is_later)
    frame_column = ReduceSum <keepdims = 1> (later, axis_1)
    row_shape = Constant <value_ints = [1, -1]> ()
    frame_row = Reshape (frame_column, row_shape)
    seen = Equal (frame_column, frame_row)
    factor_f32 = Constant <value_float: float = @scale> ()
    factor = Cast <to = TYPE> (factor_f32)
    products = MatMul (q_by_head, k_columns)
    scaled = Mul (products, factor)
    never_f32 = Constant <value_float = -30000.0> ()
    never = Cast <to = TYPE> (never_f32)
    masked = Where (seen, scaled, never)
    weights = Softmax <axis = -1> (masked)
    mixed = MatMul (weights, v_by_head)
    by_row = Transpose <perm = [1, 0, 2]> (mixed)
    out_shape = Concat <axis = 0> (any, width)
    out = Reshape (by_row, out_shape)
"""
}
_LOWERINGS = {
    "VisionAttention": _VISION_ATTENTION,
    "PickRows": _PICK_ROWS,
    "SiluMul": _SILU_MUL,
    "AddRmsNorm": _ADD_RMS_NORM,
    "QKNormMRope": _QK_NORM_MROPE,
    "TreeAttention": _TREE_ATTENTION,
}


def lowered(model: onnx.ModelProto, dtype: int) -> onnx.ModelProto:
    """``model`` (``graph.trt_export``, compute type ``dtype``), plugin nodes replaced by
    standard operators.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    functions: dict[tuple[str, str], onnx.FunctionProto] = {}
    for node in made.graph.node:
        if node.domain == DOMAIN:
            overload = _overload(node)
            own = OPS[node.op_type].attributes[overload]
            kept = [a for a in node.attribute if a.name in own]
            del node.attribute[:]
            node.attribute.extend(kept)
            name = f"{node.op_type}_{overload}"
            functions.setdefault(
                (node.op_type, overload), _function(node.op_type, overload, name, dtype)
            )
            node.op_type = name
    made.functions.extend(functions.values())
    made = inliner.inline_local_functions(made)
    _fold_constants(made.graph)
    for node in made.graph.node:  # by name TensorRT 8.6 is told what computes in float32
        node.name = node.name or f"{node.output[0]}/{node.op_type}"
    return made


def _fold_constants(graph: onnx.GraphProto) -> None:
    """Compute what follows from attributes alone:

    TensorRT wants the sizes of a Split, for one, as constants.
    """
    known = {
        i.name: onnx.numpy_helper.to_array(i) for i in graph.initializer if not i.external_data
    }
    for node in list(graph.node):
        if node.domain or not all(name in known for name in node.input):
            continue
        function = ReferenceEvaluator(_alone(node))
        known[node.output[0]] = function.run(None, {name: known[name] for name in node.input})[0]
        graph.initializer.append(
            onnx.numpy_helper.from_array(np.asarray(known[node.output[0]]), node.output[0])
        )
        graph.node.remove(node)


def _alone(node: onnx.NodeProto) -> onnx.ModelProto:
    inputs, outputs = (
        [onnx.ValueInfoProto(name=n) for n in names] for names in (node.input, node.output)
    )
    graph = onnx.helper.make_graph([node], "alone", inputs, outputs)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", PLUGIN_OPSET)])


def _overload(node: onnx.NodeProto) -> str:
    """Which overload a node is, by its number of inputs."""
    inputs = OPS[node.op_type].inputs
    return next(name for name, parameters in inputs.items() if len(parameters) == len(node.input))


def _function(op_type: str, overload: str, name: str, dtype: int) -> onnx.FunctionProto:
    op = OPS[op_type]
    attributes = f"<{', '.join(op.attributes[overload])}>" if op.attributes[overload] else ""
    return parser.parse_function(f"""
        <domain: "{DOMAIN}", opset_import: ["" : {PLUGIN_OPSET}]>
        {name} {attributes} ({", ".join(op.inputs[overload])})
        => ({", ".join(op.outputs[overload])})
        {{ {_LOWERINGS[op_type][overload].replace("TYPE", str(dtype))} }}
    """)
