"""Split the packed projection, normalise the heads of q and k, and rotate them by position.

Splits qkv into q, k, v. Normalises each head of q and k (overload "norm", and "norm_offset" as in
``AddRmsNorm``). Rotates pair i of every head of q and k (channels i and i + P) by
``position_ids[pair_axis[i]] * inv_freq[i]``. Channels from 2 P on are unchanged.

Shapes: P pairs, D/2 or fewer; qkv T [N, (Hq + 2 Hkv) * D]; position_ids int32 [3, B, S]; inv_freq
float32 [P]; pair_axis int32 [P]; q_norm, k_norm T [D]; q T [N, Hq * D]; k, v T [N, Hkv * D].
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from trt_eagle3.graph.ops.add_rms_norm import (
    EPSILON_17,
    NORM_17,
    NORM_OFFSET_17,
    OFFSET_NORM,
    add_rms_norm,
)
from trt_eagle3.graph.ops.kernel import Kernel, KernelCall
from trt_eagle3.graph.ops.op import Op, Shapes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KERNEL", "QK_NORM_MROPE", "qk_norm_mrope", "qk_norm_mrope_call"]

KERNEL = Kernel(
    name="qk_norm_mrope",
    params="QKNormMRopeParams",
    doc="""Splits qkv, normalises each head of q and k (with q_norm and k_norm), rotates pair i
(channels i, i + P) by position_ids[pair_axis[i]] * inv_freq[i]. Channels from 2 P on are
unchanged.""",
    tensors={
        "qkv": "T [N, (Hq + 2 Hkv) * D]",
        "position_ids": "int32 [3, B, S]",
        "inv_freq": "float32 [P], P at most D / 2",
        "pair_axis": "int32 [P], each 0, 1 or 2",
        "q_norm": "T [D], or null data with k_norm's",
        "k_norm": "T [D]",
        "q": "T [N, Hq * D]",
        "k": "T [N, Hkv * D]",
        "v": "T [N, Hkv * D]",
    },
    writes=("q", "k", "v"),
    scalars={
        "num_heads": (int, ""),
        "num_kv_heads": (int, ""),
        "head_dim": (int, ""),
        "epsilon": (float, ""),
        "weight_offset": (float, "added to q_norm and k_norm"),
        "prefetch_safe": (
            int,
            "as linear's, of position_ids, inv_freq, pair_axis and the norms",
        ),
    },
    sizes="""
    int32_t num_tokens;  // N
    int32_t num_pairs;   // P
    DType dtype;
    """,
)

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
_HEADS = """
    minus_one = Constant <value_ints = [-1]> ()
    dim_1d = Reshape (dim, one)
    by_head = Concat <axis = 0> (minus_one, dim_1d)
    q_rows = Reshape (q_flat, by_head)
    k_rows = Reshape (k_flat, by_head)
"""
_NORM = """
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
    q_turned = RotaryEmbedding <num_heads: int = @num_heads{rotary}> (q_bs, cos, sin)
    k_turned = RotaryEmbedding <num_heads: int = @num_kv_heads{rotary}> (k_bs, cos, sin)
    flat_minus_one = Constant <value_ints = [-1]> ()
    q_out_shape = Concat <axis = 0> (flat_minus_one, q_width)
    k_out_shape = Concat <axis = 0> (flat_minus_one, kv_width)
    q = Reshape (q_turned, q_out_shape)
    k = Reshape (k_turned, k_out_shape)
"""

_CUT_17 = """
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
    num_pairs = Shape (inv_freq)
    pair_positions = Gather <axis = 0> (position_ids, pair_axis)
    positions = Transpose <perm = [1, 2, 0]> (pair_positions)
    positions_f32 = Cast <to = 1> (positions)
    angles = Mul (positions_f32, inv_freq)
    row_shape = Concat <axis = 0> (any, one, num_pairs)
    angle_rows = Reshape (angles, row_shape)
    cos_f32 = Cos (angle_rows)
    sin_f32 = Sin (angle_rows)
    cos = Cast <to = TYPE> (cos_f32)
    sin = Cast <to = TYPE> (sin_f32)
"""
_HEADS_17 = """
    {p}_shape = Concat <axis = 0> (any, {heads}, dim_1d)
    {p}_heads = Reshape ({p}_flat, {p}_shape)
"""
_HALVES_17 = """
    halves = Concat <axis = 0> (num_pairs, num_pairs)
"""
_PARTS_17 = """
    turned_dim = Add (num_pairs, num_pairs)
    still_dim = Sub (dim_1d, turned_dim)
    halves = Concat <axis = 0> (num_pairs, num_pairs, still_dim)
"""
_TURN_17 = """
    {p}_low, {p}_high{still} = Split <axis = -1> ({rows}, halves)
    {p}_low_cos = Mul ({p}_low, cos)
    {p}_high_sin = Mul ({p}_high, sin)
    {p}_high_cos = Mul ({p}_high, cos)
    {p}_low_sin = Mul ({p}_low, sin)
    {p}_left = Sub ({p}_low_cos, {p}_high_sin)
    {p}_right = Add ({p}_high_cos, {p}_low_sin)
    {p}_turned = Concat <axis = -1> ({p}_left, {p}_right{still})
    {p}_flat_shape = Concat <axis = 0> (any, {width})
    {p} = Reshape ({p}_turned, {p}_flat_shape)
"""
_Q, _K = (
    {"p": "q", "heads": "q_count", "width": "q_width"},
    {"p": "k", "heads": "kv_count", "width": "kv_width"},
)


def qk_norm_mrope(
    qkv: Tensor,
    position_ids: Tensor,
    inv_freq: Tensor,
    pair_axis: Tensor,
    *norms: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    epsilon: float = 0.0,
    weight_offset: float = 0.0,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split ``qkv`` [N, (Hq + 2 Hkv) D], normalise the heads of q and k, and rotate them.

    ``rotary_dim``, an attribute of the lowering, is 2 P.
    """
    import torch

    pairs = len(inv_freq)
    assert rotary_dim in {None, 2 * pairs}, (rotary_dim, pairs)

    heads = (num_heads, num_kv_heads)
    q, k, v = qkv.split(
        [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim], dim=-1
    )
    angles = position_ids.index_select(0, pair_axis).flatten(1).T.float() * inv_freq
    cos, sin = angles.cos().to(qkv.dtype)[:, None], angles.sin().to(qkv.dtype)[:, None]
    turned = []
    for i, (part, count) in enumerate(zip((q, k), heads, strict=True)):
        by_head = part.unflatten(-1, (count, head_dim))
        if norms:
            by_head = add_rms_norm(by_head, norms[i], epsilon=epsilon, weight_offset=weight_offset)
        low, high, still = by_head.split([pairs, pairs, head_dim - 2 * pairs], dim=-1)
        both = [low * cos - high * sin, high * cos + low * sin, still]
        turned.append(torch.cat(both, dim=-1).flatten(1))
    return turned[0], turned[1], v.contiguous()


def qk_norm_mrope_call(
    qkv: Tensor,
    position_ids: Tensor,
    inv_freq: Tensor,
    pair_axis: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    epsilon: float = 0.0,
    weight_offset: float = 0.0,
    rotary_dim: int | None = None,
    prefetch_safe: bool = False,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> KernelCall[tuple[Tensor, Tensor, Tensor]]:
    """Build the kernel call that splits the projection, normalises q and k, and rotates them.

    Args:
        qkv: T [N, (Hq + 2 Hkv) * D].
        position_ids: int32 [3, B, S].
        inv_freq: float32 [P].
        pair_axis: int32 [P], each 0, 1 or 2.
        q_norm, k_norm: T [D], or neither.
        weight_offset: added to q_norm and k_norm.
        rotary_dim: 2 P, an attribute of the lowering.
        prefetch_safe: everything but qkv is older than any launch that may still run (see
            ``linear``).
    Returns:
        q T [N, Hq * D], k and v T [N, Hkv * D].
    Raises:
        ValueError: a tensor does not fit; the message names it.
    """
    assert rotary_dim in {None, 2 * len(inv_freq)}, (rotary_dim, len(inv_freq))
    if out is None:
        widths = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        q, k, v = (qkv.new_empty(qkv.shape[0], width) for width in widths)
        out = (q, k, v)
    tensors = {
        "qkv": qkv,
        "position_ids": position_ids,
        "inv_freq": inv_freq,
        "pair_axis": pair_axis,
        "q_norm": q_norm,
        "k_norm": k_norm,
        **dict(zip("qkv", out, strict=True)),
    }
    scalars = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "epsilon": epsilon,
        "weight_offset": weight_offset,
        "prefetch_safe": prefetch_safe,
    }
    return KernelCall(KERNEL, tensors, scalars, out)


_INPUTS = ("qkv", "position_ids", "inv_freq", "pair_axis")
_GEOMETRY = ("num_heads", "num_kv_heads", "head_dim")
_ROTARY = ", rotary_embedding_dim: int = @rotary_dim"


def _lowering_17(norm: str, *, still: bool) -> str:
    """``norm``: nodes for each head, or empty; ``still``: whether some channels are unchanged."""
    parts = [_CUT_17, _PARTS_17 if still else _HALVES_17, EPSILON_17 if norm else ""]
    for names in (_Q, _K):
        p = names["p"]
        rows = f"{p}_normed" if norm else f"{p}_heads"
        parts.append(_HEADS_17.format(**names))
        parts.append(norm.format(x=f"{p}_heads", y=f"{p}_normed", weight=f"{p}_norm"))
        parts.append(_TURN_17.format(rows=rows, still=f", {p}_still" if still else "", **names))
    return "".join(parts)


def _offset_norms() -> str:
    return "".join(
        OFFSET_NORM.format(x=f"{p}_rows", y=f"{p}_normed", weight=f"{p}_norm") for p in "qk"
    )


_HEAD_DIM_MULTIPLE, _MAX_HEAD_DIM = 4, 256


def _plugin_refuses(attributes: Mapping[str, Any], shapes: Shapes, compute: int) -> str:
    del shapes, compute
    head_dim = attributes["head_dim"]
    if head_dim % _HEAD_DIM_MULTIPLE == 0 and head_dim <= _MAX_HEAD_DIM:
        return ""
    return (
        f"heads have {head_dim} channels, expected a multiple of {_HEAD_DIM_MULTIPLE}, at most "
        f"{_MAX_HEAD_DIM}"
    )


QK_NORM_MROPE = Op(
    inputs={
        "": _INPUTS,
        "norm": (*_INPUTS, "q_norm", "k_norm"),
        "norm_offset": (*_INPUTS, "q_norm", "k_norm"),
    },
    outputs=dict.fromkeys(("", "norm", "norm_offset"), ("q", "k", "v")),
    attributes={
        "": _GEOMETRY,
        "norm": (*_GEOMETRY, "epsilon"),
        "norm_offset": (*_GEOMETRY, "epsilon", "weight_offset", "rotary_dim"),
    },
    float_attributes=("epsilon", "weight_offset"),
    types={"position_ids": "int32", "inv_freq": "float32", "pair_axis": "int32"},
    lowering={
        "": _CUT + _TURN.format(q="q_flat", k="k_flat", rotary=""),
        "norm": _CUT + _HEADS + _NORM + _TURN.format(q="q_normed", k="k_normed", rotary=""),
        "norm_offset": _CUT
        + _HEADS
        + _offset_norms()
        + _TURN.format(q="q_normed", k="k_normed", rotary=_ROTARY),
    },
    lowering_17={
        "": _lowering_17("", still=False),
        "norm": _lowering_17(NORM_17, still=False),
        "norm_offset": _lowering_17(NORM_OFFSET_17, still=True),
    },
    torch_function=qk_norm_mrope,
    kernel=KERNEL,
    # prefetch_safe: positions are inputs of the graph, and the launch before is a product
    kernel_call=partial(qk_norm_mrope_call, prefetch_safe=True),
    plugin="QKNormMRope",
    plugin_refuses=_plugin_refuses,
)
