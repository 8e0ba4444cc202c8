"""Rotate the heads of q and k by row and column, then attend from each patch over its frame.

Rotates pair i of every head of q and k (channels i and i + D/2) by ``rope_positions[pair_axis[i]] *
inv_freq[i]``, in float32. Then each patch attends over its own frame: patches frame_starts[f] to
frame_starts[f + 1] - 1.

Shapes: n patches, F frames, H heads. qkv T [n, 3 * H * D]; rope_positions int32 [2, n]; inv_freq
float32 [D/2]; pair_axis int32 [D/2]; frame_starts int32 [F + 1], ascending from 0 to n; frames may
be empty; out T [n, H * D].
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from trt_eagle3.graph.ops.kernel import AttentionPath, Kernel, KernelCall
from trt_eagle3.graph.ops.op import Op, Shapes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KERNEL", "VISION_ATTENTION", "vision_attention", "vision_attention_call"]

KERNEL = Kernel(
    name="vision_attention",
    params="VisionAttentionParams",
    doc="""Rotates pair i (channels i and i + D/2) of every head of q and k by
rope_positions[pair_axis[i]] * inv_freq[i], then attends from each patch over the patches of its own
frame. Frame f has patches frame_starts[f] to frame_starts[f + 1] - 1, or none. float32, and
head_dims other than 64, 72, 80 and 128, are computed without tensor cores.""",
    tensors={
        "qkv": "T [n, 3 * H * D]: q, k and v of all heads",
        "rope_positions": "int32 [2, n]",
        "inv_freq": "float32 [D / 2]",
        "pair_axis": "int32 [D / 2], each 0 or 1",
        "frame_starts": "int32 [F + 1], ascending from 0 to n",
        "out": "T [n, H * D]",
    },
    writes=("out",),
    scalars={
        "num_heads": (int, ""),
        "scale": (float, ""),
        "path": (AttentionPath, "only for tests and measurements"),
    },
    sizes="""
    int32_t num_patches;  // n
    int32_t num_frames;   // F
    int32_t head_dim;
    DType dtype;
    """,
    workspace="""Bytes of device memory, aligned to 16, that te3_vision_attention needs besides its
tensors. It depends only on the shapes. Its contents are not kept between launches.""",
)

# Processes the queries in pieces of one frame whose scores take at most 32 MiB. (A sequence cannot
# hold bfloat16, so the pieces are float32.)
_LOWERING = """
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

# Processes all patches at once and separates frames by a mask. This is the cost without a kernel.
_TURN_17 = "".join(
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
_LOWERING_17 = (
    """
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
    + _TURN_17
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
)


def vision_attention(
    qkv: Tensor,
    rope_positions: Tensor,
    inv_freq: Tensor,
    pair_axis: Tensor,
    frame_starts: Tensor,
    *,
    num_heads: int,
    scale: float,
) -> Tensor:
    """Attend from each patch over its own frame: ``[n, H * D]``."""
    angles = rope_positions.index_select(0, pair_axis).T.float() * inv_freq
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).unbind(1)
    q, k = (_turned_in_float32(x, cos, sin) for x in (q, k))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    attend = _attend_all_at_once if _is_small_on_cuda(qkv) else _attend_by_frame
    return attend(q, k, v, frame_starts, scale)[0].transpose(0, 1).flatten(1)


# as many as may be captured (engine/runtime/buckets.py): lengths cannot be read on the host then
_MASKED_PATCHES = 2048


def _is_small_on_cuda(qkv: Tensor) -> bool:
    return qkv.device.type == "cuda" and qkv.shape[0] <= _MASKED_PATCHES


def _turned_in_float32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    import torch

    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


def _attend_all_at_once(
    q: Tensor, k: Tensor, v: Tensor, frame_starts: Tensor, scale: float
) -> Tensor:
    import torch
    from torch.nn import functional

    patch = torch.arange(q.shape[2], device=q.device)
    frame = torch.searchsorted(frame_starts, patch, right=True, out_int32=True)
    seen = frame[:, None] == frame
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)


_PIECE_SCORES = 1 << 23  # of all heads: a piece's scores take 32 MiB if torch stores them


def _attend_by_frame(q: Tensor, k: Tensor, v: Tensor, frame_starts: Tensor, scale: float) -> Tensor:
    """Attend frame by frame, and in pieces of the queries, so that memory stays bounded."""
    import torch
    from torch.nn import functional

    out = torch.empty_like(q)
    starts = frame_starts.tolist()
    for start, end in pairwise(starts):
        rows = max(16, _PIECE_SCORES // (q.shape[1] * max(end - start, 1)))
        for first in range(start, end, rows):
            piece = slice(first, min(first + rows, end))
            out[:, :, piece] = functional.scaled_dot_product_attention(
                q[:, :, piece], k[:, :, start:end], v[:, :, start:end], scale=scale
            )
    return out


def vision_attention_call(
    qkv: Tensor,
    rope_positions: Tensor,
    inv_freq: Tensor,
    pair_axis: Tensor,
    frame_starts: Tensor,
    *,
    num_heads: int,
    scale: float,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    path: AttentionPath = AttentionPath.AUTO,
) -> KernelCall[Tensor]:
    """Build the kernel call that rotates q and k, then attends from each patch over its frame.

    Args:
        qkv: T [n, 3 * H * D], D a multiple of 4 and at most 128.
        rope_positions: int32 [2, n].
        inv_freq: float32 [D / 2].
        pair_axis: int32 [D / 2], 0 or 1.
        frame_starts: int32 [F + 1], ascending from 0 to n; frames may be empty.
        workspace: uint8, for the packed q, k and v; allocated if needed and not given.
    Returns:
        T [n, H * D].
    Raises:
        ValueError: a tensor does not fit; the message names it.
        NotImplementedError: ``path`` does not exist for this head_dim, type or device.
    """
    out = qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3) if out is None else out
    tensors = {
        "qkv": qkv,
        "rope_positions": rope_positions,
        "inv_freq": inv_freq,
        "pair_axis": pair_axis,
        "frame_starts": frame_starts,
        "out": out,
    }
    scalars = {"num_heads": num_heads, "scale": scale, "path": path}
    return KernelCall(KERNEL, tensors, scalars, out, workspace)


_HEAD_DIM_MULTIPLE, _MAX_HEAD_DIM = 4, 128


def _plugin_refuses(attributes: Mapping[str, Any], shapes: Shapes, compute: int) -> str:
    del attributes, compute
    head_dim = 2 * int(shapes["inv_freq"][0])
    if head_dim % _HEAD_DIM_MULTIPLE == 0 and head_dim <= _MAX_HEAD_DIM:
        return ""
    return (
        f"heads have {head_dim} channels, expected a multiple of {_HEAD_DIM_MULTIPLE}, at most "
        f"{_MAX_HEAD_DIM}"
    )


VISION_ATTENTION = Op(
    inputs={"": ("qkv", "rope_positions", "inv_freq", "pair_axis", "frame_starts")},
    outputs={"": ("out",)},
    attributes={"": ("num_heads", "scale")},
    float_attributes=("scale",),
    types={
        "rope_positions": "int32",
        "inv_freq": "float32",
        "pair_axis": "int32",
        "frame_starts": "int32",
    },
    lowering={"": _LOWERING},
    lowering_17={"": _LOWERING_17},
    torch_function=vision_attention,
    kernel=KERNEL,
    kernel_call=vision_attention_call,
    plugin="VisionAttention",
    plugin_refuses=_plugin_refuses,
)
