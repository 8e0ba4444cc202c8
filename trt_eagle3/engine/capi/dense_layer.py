"""Kernels of a decoder layer's dense products after attention, and of the next layer's q, k and v.

Shapes: M rows, A attention width, H hidden, I inner width, N columns of q, k and v. T is float16 or
bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trt_eagle3.graph.ops.kernel import Kernel, KernelCall

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DENSE_LAYER_KERNELS",
    "MAX_DENSE_LAYER_ROWS",
    "DenseLayerRows",
    "dense_layer_fp8_call",
    "dense_layer_int4_call",
]

MAX_DENSE_LAYER_ROWS = 16

_PRODUCTS = ("o", "gate_up", "down", "qkv")
_DOC = """middle = residual + x . o^T; inner = silu(gate) * up, of gate and up =
RMSNorm(middle) . gate_up^T; total = middle + inner . down^T; y = RMSNorm(total) . qkv^T. Without
next_norm (null data, as qkv's, its scale's and y's) total is inner . down^T, and there is no y.
Products, norms and inner values are rounded to T; sums are float32, in an order that does not
depend on M. All blocks of the launch wait for each other at the barrier, which must be 0 before the
first launch, and belong to one launch at a time. TE3_NOT_SUPPORTED for float32, for more than 16
rows, before Hopper, for H above 8192, and if the chip's blocks cannot run together or rows do not
fit into shared memory. A, H and I must be multiples of 128, N of 16. prefetch_safe: as linear's,
for weights, scales and norms."""
_ROWS = {
    "x": "T [M, A]",
    "residual": "T [M, H]",
    "norm": "T [H]; the factor is norm + weight_offset",
    "next_norm": "T [H], as norm; or null data",
}
_SHAPES = {"o": "[H, A]", "gate_up": "[2 * I, H], gate first", "down": "[H, I]", "qkv": "[N, H]"}
_OUT = {
    "barrier": "int32 [1]; 0 before the first launch",
    "middle": "T [M, H]",
    "inner": "T [M, I]",
    "total": "T [M, H]",
    "y": "T [M, N], or null data",
}
_WRITES = ("barrier", "middle", "inner", "total", "y")
_SCALARS: Mapping[str, tuple[type[int] | type[float], str]] = {
    "epsilon": (float, ""),
    "weight_offset": (float, ""),
    "slots": (int, "most of a warp's ring; only for tests and measurements. 0: chosen"),
    "prefetch_safe": (int, ""),
}
_SIZES = """
    int32_t num_rows;    // M
    int32_t attended;    // A
    int32_t hidden;      // H
    int32_t width;       // I
    int32_t next_width;  // N
    DType dtype;
    """


def _int4_tensors() -> dict[str, str]:
    found = {}
    for name in _PRODUCTS:
        found[name] = f"int32 {_SHAPES[name]}, packed codes 0 to 15, 8 in a number"
        found[f"{name}_scale"] = "float16 or bfloat16 (all the same), one for 128 columns of a row"
        found[f"{name}_zero_point"] = "uint8, of the scale's shape; null data: 8"
    return found


def _fp8_tensors() -> dict[str, str]:
    found = {}
    for name in _PRODUCTS:
        found[name] = f"float8_e4m3fn {_SHAPES[name]}, packed"
        found[f"{name}_scale"] = "float32 [rows, columns], as linear_fp8's"
    return found


DENSE_LAYER_INT4 = Kernel(
    name="dense_layer_int4",
    params="DenseLayerInt4Params",
    doc=_DOC,
    tensors={**_ROWS, **_int4_tensors(), **_OUT},
    writes=_WRITES,
    scalars=_SCALARS,
    sizes=_SIZES + "    DType scale_dtype;\n",
)

DENSE_LAYER_FP8 = Kernel(
    name="dense_layer_fp8",
    params="DenseLayerFp8Params",
    doc=_DOC,
    tensors={**_ROWS, **_fp8_tensors(), **_OUT},
    writes=_WRITES,
    scalars=_SCALARS,
    sizes=_SIZES
    + "".join(f"    int32_t {n}_scale_rows;\n    int32_t {n}_scale_columns;\n" for n in _PRODUCTS),
)

DENSE_LAYER_KERNELS = (DENSE_LAYER_INT4, DENSE_LAYER_FP8)


@dataclass(frozen=True)
class DenseLayerRows:
    """Results of ``dense_layer_*_call``.

    ``middle``: T [M, H]. ``total``: T [M, H]; the product alone if there is no next layer. ``y``: T
    [M, N], or None.
    """

    middle: Tensor
    total: Tensor
    y: Tensor | None


def dense_layer_int4_call(
    x: Tensor,
    residual: Tensor,
    norms: Sequence[Tensor],
    weights: Sequence[tuple[Tensor, Tensor, Tensor | None]],
    barrier: Tensor,
    *,
    epsilon: float,
    weight_offset: float = 0.0,
    slots: int = 0,
    prefetch_safe: bool = False,
    out: DenseLayerRows | None = None,
    inner: Tensor | None = None,
) -> KernelCall[DenseLayerRows]:
    """Compute the layer after attention ``x``; see the kernel's description.

    Args:
        x: T [M, A]. residual: T [M, H].
        norms: T [H]; one, or two with a next layer.
        weights: of o, gate_up, down, and of qkv with a next layer: codes, scale and zero point as
            in ``linear_int4_call``, with groups of 128 columns.
        barrier: int32 [1], 0 before the first launch. No other launch may use it meanwhile.
        slots, prefetch_safe: see the kernel's description.
        out, inner: tensors for the results and for T [M, I].
    Raises:
        ValueError: a tensor does not fit; the message names it.
        NotImplementedError: no kernel computes this; use single products.
    """
    tensors: dict[str, Tensor | None] = {}
    for name, (codes, scale, zero_point) in zip(_PRODUCTS, weights, strict=False):
        tensors |= {name: codes, f"{name}_scale": scale, f"{name}_zero_point": zero_point}
    scalars = (epsilon, weight_offset, slots, prefetch_safe)
    return _call(DENSE_LAYER_INT4, x, residual, norms, tensors, barrier, scalars, out, inner)


def dense_layer_fp8_call(
    x: Tensor,
    residual: Tensor,
    norms: Sequence[Tensor],
    weights: Sequence[tuple[Tensor, Tensor]],
    barrier: Tensor,
    *,
    epsilon: float,
    weight_offset: float = 0.0,
    slots: int = 0,
    prefetch_safe: bool = False,
    out: DenseLayerRows | None = None,
    inner: Tensor | None = None,
) -> KernelCall[DenseLayerRows]:
    """Compute the layer after attention ``x``; see ``dense_layer_int4_call``. ``weights``: codes
    and scale as in ``linear_fp8_call``.
    """
    tensors: dict[str, Tensor | None] = {}
    for name, (codes, scale) in zip(_PRODUCTS, weights, strict=False):
        tensors |= {name: codes, f"{name}_scale": scale}
    scalars = (epsilon, weight_offset, slots, prefetch_safe)
    return _call(DENSE_LAYER_FP8, x, residual, norms, tensors, barrier, scalars, out, inner)


def _call(
    kernel: Kernel,
    x: Tensor,
    residual: Tensor,
    norms: Sequence[Tensor],
    weights: Mapping[str, Tensor | None],
    barrier: Tensor,
    scalars: Sequence[float],
    out: DenseLayerRows | None,
    inner: Tensor | None,
) -> KernelCall[DenseLayerRows]:
    gate_up, qkv = weights["gate_up"], weights.get("qkv")
    assert gate_up is not None
    rows = len(x)
    if inner is None:
        inner = x.new_empty(rows, len(gate_up) // 2)
    if out is None:
        y = None if qkv is None else x.new_empty(rows, len(qkv))
        out = DenseLayerRows(x.new_empty(residual.shape), x.new_empty(residual.shape), y)
    tensors = {
        "x": x,
        "residual": residual,
        "norm": norms[0],
        "next_norm": norms[1] if len(norms) > 1 else None,
        **weights,
        "barrier": barrier,
        "middle": out.middle,
        "inner": inner,
        "total": out.total,
        "y": out.y,
    }
    return KernelCall(kernel, tensors, dict(zip(kernel.scalars, scalars, strict=True)), out)
