"""Kernels of the C library that compute no op of a graph, and the list of all its kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.engine.capi.moe import MOE_KERNELS
from trt_eagle3.engine.capi.packed import PACKED_KERNELS
from trt_eagle3.engine.capi.quantise import QUANTISE_KERNELS
from trt_eagle3.engine.capi.recurrent import RECURRENT_KERNELS
from trt_eagle3.graph.ops import EVERY_OP
from trt_eagle3.graph.ops.kernel import Kernel, KernelCall

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ADD_LAYER_NORM",
    "KERNELS",
    "KV_MOVE",
    "MAX_KV_MOVES",
    "add_layer_norm_call",
    "kv_move_call",
]

MAX_KV_MOVES = 2048  # rows of one ``kv_move``

ADD_LAYER_NORM = Kernel(
    name="add_layer_norm",
    params="AddLayerNormParams",
    doc="""sum = x + residual; y = LayerNorm(sum) * weight + bias. Without a residual (null data)
y is LayerNorm(x) * weight + bias, and there is no sum.""",
    tensors={
        "x": "T [n, H]",
        "residual": "T [n, H], or null data with sum's",
        "weight": "T [H]",
        "bias": "T [H]",
        "y": "T [n, H]",
        "sum": "T [n, H]",
    },
    writes=("y", "sum"),
    scalars={"epsilon": (float, "")},
    sizes="""
    int32_t num_rows;
    int32_t hidden;
    DType dtype;
    """,
)

KV_MOVE = Kernel(
    name="kv_move",
    params="KVMoveParams",
    doc="""Copies row source[b, i] of sequence b to row destination[b, i], in every plane. All rows
are read before any is written. A negative source or destination moves nothing. Without a page_table
(null data) rows are slots.""",
    tensors={
        "cache": "T, uint8 or int32 [planes, slots, Hkv, D]",
        "source": "int32 [B, K]",
        "destination": "int32 [B, K]",
        "page_table": "int32 [B, P], or null data",
    },
    writes=("cache",),
    scalars={"page_size": (int, "")},
    sizes="""
    int64_t slots;
    int32_t planes;
    int32_t row_bytes;  // a multiple of 16
    int32_t batch;
    int32_t num_moves;  // K
    int32_t pages_per_row;
    """,
)

KERNELS: tuple[Kernel, ...] = (
    *(op.kernel for op in EVERY_OP.values() if op.kernel),
    ADD_LAYER_NORM,
    KV_MOVE,
    *PACKED_KERNELS,
    *MOE_KERNELS,
    *QUANTISE_KERNELS,
    *RECURRENT_KERNELS,
)
"""All kernels of the C library."""


def add_layer_norm_call(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    *,
    epsilon: float,
    out: tuple[Tensor, Tensor | None] | None = None,
) -> KernelCall[tuple[Tensor, Tensor | None]]:
    """Compute ``(LayerNorm(x + residual) * weight + bias, x + residual)``; without a residual,
    ``(LayerNorm(x) ..., None)``.

    Args:
        x, residual: T [n, H]; weight, bias: T [H].
        out: tensors for the two results; ``sum`` may be ``residual`` itself and ``y`` may be ``x``.
    Raises:
        ValueError: a tensor does not fit; the message names it.
    """
    import torch

    if out is None:
        out = (torch.empty_like(x), None if residual is None else torch.empty_like(x))
    inputs = (x, residual, weight, bias, *out)
    tensors = dict(zip(ADD_LAYER_NORM.tensors, inputs, strict=True))
    return KernelCall(ADD_LAYER_NORM, tensors, {"epsilon": epsilon}, out)


def kv_move_call(
    cache: Tensor,
    source: Tensor,
    destination: Tensor,
    page_table: Tensor | None = None,
    *,
    page_size: int = 1,
) -> KernelCall[None]:
    """Copy row ``source[b, i]`` of sequence b to row ``destination[b, i]``, in every plane.

    All rows are read before any is written, so sources and destinations may overlap. Destinations
    must differ from each other. One launch moves at most ``MAX_KV_MOVES`` rows, summed over all
    sequences.

    Args:
        cache: T or uint8 [..., slots, Hkv, D], contiguous, updated in place. The axes before the
            slots (keys and values, layers) are planes; the same rows move in each.
        source, destination: int32 or int64 [B, K], or [K] for one sequence; on the CPU or the
            cache's device. A negative entry moves nothing.
        page_table: int32 [B, P]; without one, rows are slots.
    Raises:
        ValueError: a tensor does not fit; the message names it.
    """
    slots = (_slots(rows, cache) for rows in (source, destination))
    inputs = (cache.flatten(0, -4), *slots, page_table)
    tensors = dict(zip(KV_MOVE.tensors, inputs, strict=True))
    return KernelCall(KV_MOVE, tensors, {"page_size": page_size}, None)


def _slots(rows: Tensor, cache: Tensor) -> Tensor:
    """Return ``rows`` in the kernel's form: int32 [B, K], on the cache's device."""
    import torch

    return rows.to(cache.device, torch.int32, non_blocking=True).view(-1, rows.shape[-1])
