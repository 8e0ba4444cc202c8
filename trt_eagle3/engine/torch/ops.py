"""What each op of our graphs does in torch, on the CPU and on CUDA: a literal table, op ->
function.

Integer 64-bit tensors are shapes and scalar indices: they stay on the CPU, so that no shape waits
for the device. Shapes: B rows, S new tokens per row, N = B * S, M masked tail, P pages per row, Hq
/ Hkv heads, D head_dim, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from onnx import TensorProto
from torch import Tensor
from torch.nn import functional

__all__ = ["OWN_OPS", "STANDARD_OPS", "TORCH_TYPES", "Function"]

Function = Callable[..., Any]
"""``f(*inputs, **attributes) -> output or tuple of outputs``."""

TORCH_TYPES: Mapping[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
    TensorProto.BOOL: torch.bool,
}


def add_rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor | None = None, *, epsilon: float
) -> Any:
    """``RMSNorm(x) * weight``, or with a residual ``(RMSNorm(x + residual) * weight, x +
    residual)``; f32 inside.
    """
    total = x if residual is None else x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    y = normed.to(weight.dtype) * weight
    return y if residual is None else (y, total)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut ``qkv`` [N, (Hq + 2 Hkv) D] into q, k, v, normalise the heads of q and k, and turn
    them.
    """
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
            by_head = add_rms_norm(by_head, norms[i], epsilon=epsilon)
        low, high = by_head.chunk(2, dim=-1)
        turned.append(
            torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).flatten(1)
        )
    return turned[0], turned[1], v.contiguous()


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
    """Write k, v into their slots of the caches, in place, and attend over past and tail
    (``graph/ops.py``).
    """
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
    mixed = functional.scaled_dot_product_attention(
        by_head,
        keys,
        values,
        attn_mask=seen[:, None],
        scale=scale,
        enable_gqa=num_heads != num_kv_heads,
    )
    return mixed.transpose(1, 2).reshape(batch * new, -1), k_cache, v_cache


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
    """Attention of each patch over its own frame (``graph/ops.py``): ``[n, H * D]``."""
    angles = rope_positions.index_select(0, pair_axis).T.float() * inv_freq
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).unbind(1)
    q, k = (_turned_in_float32(x, cos, sin) for x in (q, k))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    attend = _attend_all_at_once if _is_small_on_cuda(qkv) else _attend_by_frame
    return attend(q, k, v, frame_starts, scale)[0].transpose(0, 1).flatten(1)


# as many as may be captured (engine/torch/cuda_graph.py): there no length can be read on the host
_MASKED_PATCHES = 2048


def _is_small_on_cuda(qkv: Tensor) -> bool:
    return qkv.device.type == "cuda" and qkv.shape[0] <= _MASKED_PATCHES


def _turned_in_float32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


def _attend_all_at_once(
    q: Tensor, k: Tensor, v: Tensor, frame_starts: Tensor, scale: float
) -> Tensor:
    patch = torch.arange(q.shape[2], device=q.device)
    frame = torch.searchsorted(frame_starts, patch, right=True, out_int32=True)
    seen = frame[:, None] == frame
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)


_PIECE_SCORES = 1 << 23  # of all heads: a piece's scores take 32 MiB where torch keeps them


def _attend_by_frame(q: Tensor, k: Tensor, v: Tensor, frame_starts: Tensor, scale: float) -> Tensor:
    """Frame by frame, and within a frame in pieces of the queries, so that memory stays bounded."""
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


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of the halves of ``gate_up [n, 2 W]``: ``[n, W]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def pick_rows(x: Tensor, rows: Tensor) -> Tensor:
    """``x [N, H]`` at ``rows [B, R]``, which count within each of the B batch rows:

    ``[B * R, H]``.
    """
    by_row = x.view(rows.shape[0], -1, x.shape[1])
    return by_row.gather(1, rows.long()[..., None].expand(-1, -1, x.shape[1])).flatten(0, 1)


def _gather(data: Tensor, index: Tensor, *, axis: int = 0) -> Tensor:
    if index.ndim == 0 and index.device.type == "cpu":
        return data.select(axis, int(index))
    flat = data.index_select(axis, index.flatten().to(data.device))
    return flat.unflatten(axis, index.shape) if index.ndim != 1 else flat


def _reshape(data: Tensor, shape: Tensor) -> Tensor:
    return data.reshape([data.shape[i] if d == 0 else d for i, d in enumerate(shape.tolist())])


def _split(data: Tensor, sizes: Tensor, *, axis: int = 0) -> tuple[Tensor, ...]:
    return torch.split(data, sizes.tolist(), dim=axis)


def _gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transB: int = 0) -> Tensor:
    return functional.linear(x, weight if transB else weight.T, bias)


def _shape(data: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(data.shape[start:end], dtype=torch.int64)


def _unsqueeze(data: Tensor, axes: Tensor) -> Tensor:
    rank = data.ndim + len(axes)
    for axis in sorted(a % rank for a in axes.tolist()):
        data = data.unsqueeze(axis)
    return data


def gelu(x: Tensor, *, approximate: bytes = b"none") -> Tensor:
    """GELU, exact or by tanh."""
    return functional.gelu(x, approximate=approximate.decode())


def _layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor, *, axis: int = -1, epsilon: float = 1e-5
) -> Tensor:
    assert axis == -1, f"LayerNormalization: axis -1, got {axis}"
    return functional.layer_norm(x, scale.shape, scale, bias, epsilon)


STANDARD_OPS: Mapping[str, Function] = {
    "Add": torch.add,
    "Clip": torch.clamp,
    "Cast": lambda x, *, to: x.to(TORCH_TYPES[to]),
    "Concat": lambda *parts, axis: torch.cat(parts, dim=axis),
    "Cos": torch.cos,
    "Div": torch.div,
    "Erf": torch.erf,
    "Gather": _gather,
    "Gelu": gelu,
    "Gemm": _gemm,
    "LayerNormalization": _layer_norm,
    "MatMul": torch.matmul,
    "Mul": torch.mul,
    "Reshape": _reshape,
    "Shape": _shape,
    "Sigmoid": torch.sigmoid,
    "Sin": torch.sin,
    "Softmax": lambda x, *, axis: torch.softmax(x, dim=axis),
    "Split": _split,
    "Sub": torch.sub,
    "Tanh": torch.tanh,
    "Transpose": lambda x, *, perm: x.permute(perm),
    "Unsqueeze": _unsqueeze,
    "Where": torch.where,
}
"""Operators of the default domain in the forms that our graphs use."""

OWN_OPS: Mapping[str, Function] = {
    "AddRmsNorm": add_rms_norm,
    "QKNormMRope": qk_norm_mrope,
    "TreeAttention": tree_attention,
    "SiluMul": silu_mul,
    "PickRows": pick_rows,
    "VisionAttention": vision_attention,
}
"""Our op set by stock torch operations."""
