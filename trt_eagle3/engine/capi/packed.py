"""Kernels for quantised weights: products, and unpacking for the stock products of prompts.
``quantise.py`` makes rows of eight bits.

A *packed* weight has the columns of each row in the order in which the kernels' lanes load them
(``plugins/kernels/packed_weight.cuh``); ``engine/torch/packing.py`` writes it.

Shapes: M rows of x, K inputs, N outputs. T is float16 or bfloat16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.graph.ops.kernel import Kernel, KernelCall

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "GROUP_SIZES",
    "MAX_PACKED_ROWS",
    "PACKED_COLUMNS",
    "PACKED_KERNELS",
    "PACKED_ROWS",
    "linear_fp8_call",
    "linear_int4_call",
    "linear_int8_call",
    "linear_nvfp4_call",
    "linear_w8a8_call",
    "unpack_fp8_call",
    "unpack_int4_call",
    "unpack_int8_call",
    "unpack_nvfp4_call",
]

MAX_PACKED_ROWS = 128  # of x, in a product with a packed weight
PACKED_COLUMNS, PACKED_ROWS = 128, 16  # K and N of a packed weight are multiples of these
GROUP_SIZES = (32, 64, 128)  # columns of an INT4 weight that share a scale

_SCALE = {"scale": "float32 [N or ceil(N / 128) or 1, 1 or K / 128]"}
_FP8 = {"weight": "float8_e4m3fn [N, K], packed", **_SCALE}
_INT8 = {"weight": "uint8 [N, K], packed codes", **_SCALE}
_INT4 = {
    "weight": "int32 [N, K / 8], packed codes 0 to 15",
    "scale": "float16 or bfloat16 [N, K / group]",
    "zero_point": "uint8 [N, K / group], 0 to 15; null data: 8",
}
_NVFP4 = {
    "weight": "int32 [N, K / 8], packed e2m1",
    "scale": "float8_e4m3fn [N, K / 16]",
    "row_scale": "float32 [N, 1]",
}
_BYTE_SIZES = """
    int32_t inner;          // K
    int32_t outer;          // N
    int32_t scale_rows;
    int32_t scale_columns;
    DType dtype;
    """
_INT4_SIZES = """
    int32_t inner;      // K
    int32_t outer;      // N
    int32_t group;      // columns of a scale
    DType scale_dtype;
    DType dtype;
    """
_FP4_SIZES = """
    int32_t inner;      // K
    int32_t outer;      // N
    DType dtype;
    """
_ROWS = "int32_t num_rows;   // M"
_FEW_ROWS = """TE3_NOT_SUPPORTED for float32 and for more than 128 rows; before Hopper also for more
than 16 rows, or if x does not fit into shared memory. K must be a multiple of 128, N of 16. The
weight is exact in T, sums and scales are float32. prefetch_safe: as linear's, for weight and
scales."""

LINEAR_FP8 = Kernel(
    name="linear_fp8",
    params="LinearFp8Params",
    doc=f"""y = x . (weight * scale)^T for a few rows of x; a scale covers one row, 128 rows or all,
and 128 columns or all. {_FEW_ROWS}""",
    tensors={"x": "T [M, K]", **_FP8, "y": "T [M, N]"},
    writes=("y",),
    scalars={"prefetch_safe": (int, "")},
    sizes=_ROWS + _BYTE_SIZES,
)

LINEAR_INT8 = Kernel(
    name="linear_int8",
    params="LinearInt8Params",
    doc="""y = x . ((weight - 128) * scale)^T for a few rows of x; scales and limits as
linear_fp8's.""",
    tensors={"x": "T [M, K]", **_INT8, "y": "T [M, N]"},
    writes=("y",),
    scalars={"prefetch_safe": (int, "")},
    sizes=_ROWS + _BYTE_SIZES,
)

LINEAR_INT4 = Kernel(
    name="linear_int4",
    params="LinearInt4Params",
    doc=f"""y = x . ((weight - zero_point) * scale)^T for a few rows of x; groups of 32, 64 or 128
columns. {_FEW_ROWS}""",
    tensors={"x": "T [M, K]", **_INT4, "y": "T [M, N]"},
    writes=("y",),
    scalars={"prefetch_safe": (int, "")},
    sizes=_ROWS + _INT4_SIZES,
)

LINEAR_NVFP4 = Kernel(
    name="linear_nvfp4",
    params="LinearNvfp4Params",
    doc=f"""y = x . (weight * scale * row_scale)^T for a few rows of x; a scale covers 16 columns.
{_FEW_ROWS}""",
    tensors={"x": "T [M, K]", **_NVFP4, "y": "T [M, N]"},
    writes=("y",),
    scalars={"prefetch_safe": (int, "")},
    sizes=_ROWS + _FP4_SIZES,
)

LINEAR_W8A8 = Kernel(
    name="linear_w8a8",
    params="LinearW8A8Params",
    doc="""y = (x * x_scale) . (weight * scale)^T, products of bytes: float8_e4m3fn by
float8_e4m3fn, summed by the chip in about 14 bits, or int8 by (codes - 128), summed exactly. Only
for int8, x_scale has a second row: the sums of the rows of x. TE3_NOT_SUPPORTED for float32, and
on chips other than Hopper. K must be a multiple of 128, N of 16. prefetch_safe: as linear's, for
weight and scale.""",
    tensors={
        "x": "float8_e4m3fn or int8 [M, K], packed",
        "x_scale": "float32 [1, M]; for int8 [2, M]",
        "weight": "float8_e4m3fn or uint8 [N, K], packed",
        "scale": "float32 [N or 1, 1]",
        "y": "T [M, N]",
    },
    writes=("y",),
    scalars={"prefetch_safe": (int, "")},
    sizes="""
    int32_t num_rows;  // M
    int32_t inner;     // K
    int32_t outer;     // N
    int32_t scale_rows;
    int32_t integers;  // whether x is int8
    DType dtype;
    """,
)

UNPACK_FP8 = Kernel(
    name="unpack_fp8",
    params="UnpackFp8Params",
    doc="out = weight * scale, rounded once, columns in their own order: for stock products.",
    tensors={**_FP8, "out": "T [N, K]"},
    writes=("out",),
    scalars={},
    sizes=_BYTE_SIZES,
)

UNPACK_INT8 = Kernel(
    name="unpack_int8",
    params="UnpackInt8Params",
    doc="""out = (weight - 128) * scale, rounded once, columns in their own order: for stock
products.""",
    tensors={**_INT8, "out": "T [N, K]"},
    writes=("out",),
    scalars={},
    sizes=_BYTE_SIZES,
)

UNPACK_INT4 = Kernel(
    name="unpack_int4",
    params="UnpackInt4Params",
    doc="""out = (weight - zero_point) * scale, rounded once, columns in their own order: for stock
products.""",
    tensors={**_INT4, "out": "T [N, K]"},
    writes=("out",),
    scalars={},
    sizes=_INT4_SIZES,
)

UNPACK_NVFP4 = Kernel(
    name="unpack_nvfp4",
    params="UnpackNvfp4Params",
    doc="""out = weight * scale * row_scale, rounded once, columns in their own order: for stock
products.""",
    tensors={**_NVFP4, "out": "T [N, K]"},
    writes=("out",),
    scalars={},
    sizes=_FP4_SIZES,
)

PACKED_KERNELS = (
    LINEAR_FP8,
    LINEAR_INT8,
    LINEAR_INT4,
    LINEAR_NVFP4,
    LINEAR_W8A8,
    UNPACK_FP8,
    UNPACK_INT8,
    UNPACK_INT4,
    UNPACK_NVFP4,
)


def linear_fp8_call(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    prefetch_safe: bool = False,
    out: Tensor | None = None,
) -> KernelCall[Tensor]:
    """Compute ``x @ (weight * scale).T`` for at most 128 rows.

    Args:
        x: T [M, K]. weight: float8_e4m3fn [N, K], packed. scale: float32, [N, ceil(N / 128) or 1
            rows, 1 or K / 128 columns].
        prefetch_safe: as in ``linear_call``, for weight and scale.
    Raises:
        ValueError: a tensor does not fit; the message names it.
        NotImplementedError: float32, too many rows.
    """
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    tensors = {"x": x, "weight": weight, "scale": scale, "y": out}
    return KernelCall(LINEAR_FP8, tensors, {"prefetch_safe": prefetch_safe}, out)


def linear_int8_call(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    prefetch_safe: bool = False,
    out: Tensor | None = None,
) -> KernelCall[Tensor]:
    """Compute ``x @ ((weight - 128) * scale).T`` for at most 128 rows; see ``linear_fp8_call``.
    weight: uint8 [N, K], packed.
    """
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    tensors = {"x": x, "weight": weight, "scale": scale, "y": out}
    return KernelCall(LINEAR_INT8, tensors, {"prefetch_safe": prefetch_safe}, out)


def linear_int4_call(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    prefetch_safe: bool = False,
    out: Tensor | None = None,
) -> KernelCall[Tensor]:
    """Compute ``x @ ((weight - zero_point) * scale).T`` for at most 128 rows.

    Args:
        x: T [M, K]. weight: int32 [N, K / 8], packed. scale: float16 or bfloat16 [N, K / group].
        zero_point: uint8 [N, K / group]; None is 8 for all.
        prefetch_safe: as in ``linear_call``, for weight, scale and zero_point.
    Raises:
        ValueError: a tensor does not fit; the message names it.
        NotImplementedError: float32, too many rows.
    """
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    tensors = {"x": x, "weight": weight, "scale": scale, "zero_point": zero_point, "y": out}
    return KernelCall(LINEAR_INT4, tensors, {"prefetch_safe": prefetch_safe}, out)


def linear_nvfp4_call(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    row_scale: Tensor,
    *,
    prefetch_safe: bool = False,
    out: Tensor | None = None,
) -> KernelCall[Tensor]:
    """Compute ``x @ (weight * scale * row_scale).T`` for at most 128 rows.

    Args:
        x: T [M, K]. weight: int32 [N, K / 8], packed codes of e2m1. scale: float8_e4m3fn
            [N, K / 16]. row_scale: float32 [N, 1].
        prefetch_safe: as in ``linear_call``, for weight and scales.
    Raises:
        ValueError: a tensor does not fit; the message names it.
        NotImplementedError: float32, too many rows.
    """
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    tensors = {"x": x, "weight": weight, "scale": scale, "row_scale": row_scale, "y": out}
    return KernelCall(LINEAR_NVFP4, tensors, {"prefetch_safe": prefetch_safe}, out)


def linear_w8a8_call(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    prefetch_safe: bool = False,
    out: Tensor | None = None,
) -> KernelCall[Tensor]:
    """Compute ``(x * x_scale) @ (weight * scale).T`` in ``dtype`` [M, N].

    Args:
        x, x_scale: as ``quantise_rows`` makes them, in FP8 or int8.
        weight: float8_e4m3fn, or uint8 codes + 128, [N, K], packed. scale: float32 [N or 1, 1].
        prefetch_safe: as in ``linear_call``, for weight and scale.
    Raises:
        ValueError: a tensor does not fit; the message names it.
        NotImplementedError: float32; a chip other than Hopper.
    """
    out = x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype) if out is None else out
    tensors = {"x": x, "x_scale": x_scale, "weight": weight, "scale": scale, "y": out}
    return KernelCall(LINEAR_W8A8, tensors, {"prefetch_safe": prefetch_safe}, out)


def unpack_fp8_call(
    weight: Tensor, scale: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
) -> KernelCall[Tensor]:
    """Compute ``weight * scale`` in ``dtype`` [N, K]."""
    out = weight.new_empty(weight.shape, dtype=dtype) if out is None else out
    return KernelCall(UNPACK_FP8, {"weight": weight, "scale": scale, "out": out}, {}, out)


def unpack_int8_call(
    weight: Tensor, scale: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
) -> KernelCall[Tensor]:
    """Compute ``(weight - 128) * scale`` in ``dtype`` [N, K]."""
    out = weight.new_empty(weight.shape, dtype=dtype) if out is None else out
    return KernelCall(UNPACK_INT8, {"weight": weight, "scale": scale, "out": out}, {}, out)


def unpack_int4_call(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> KernelCall[Tensor]:
    """Compute ``(weight - zero_point) * scale`` in ``dtype`` [N, K]."""
    rows, words = weight.shape
    out = weight.new_empty((rows, words * 8), dtype=dtype) if out is None else out
    tensors = {"weight": weight, "scale": scale, "zero_point": zero_point, "out": out}
    return KernelCall(UNPACK_INT4, tensors, {}, out)


def unpack_nvfp4_call(
    weight: Tensor,
    scale: Tensor,
    row_scale: Tensor,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> KernelCall[Tensor]:
    """Compute ``weight * scale * row_scale`` in ``dtype`` [N, K]."""
    rows, words = weight.shape
    out = weight.new_empty((rows, words * 8), dtype=dtype) if out is None else out
    tensors = {"weight": weight, "scale": scale, "row_scale": row_scale, "out": out}
    return KernelCall(UNPACK_NVFP4, tensors, {}, out)
