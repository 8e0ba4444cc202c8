"""The kernels for quantised weights: products for few rows, and what prompts need beside stock
products.

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
    "PACKED_COLUMNS",
    "PACKED_KERNELS",
    "PACKED_ROWS",
    "linear_fp8_call",
    "linear_int4_call",
    "linear_int8_call",
    "quantise_rows_call",
    "round_rows_call",
    "unpack_fp8_call",
    "unpack_int4_call",
    "unpack_int8_call",
]

PACKED_COLUMNS, PACKED_ROWS = 128, 16  # K and N of a packed weight are multiples
GROUP_SIZES = (32, 64, 128)  # columns of an INT4 weight that share a scale

_SCALE = {"scale": "float32 [N or ceil(N / 128) or 1, 1 or K / 128]"}
_FP8 = {"weight": "float8_e4m3fn [N, K], packed", **_SCALE}
_INT8 = {"weight": "uint8 [N, K], packed codes", **_SCALE}
_INT4 = {
    "weight": "int32 [N, K / 8], packed codes 0 to 15",
    "scale": "float16 or bfloat16 [N, K / group]",
    "zero_point": "uint8 [N, K / group], 0 to 15; null data: 8",
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
_ROWS = "int32_t num_rows;   // M"
_FEW_ROWS = """TE3_NOT_SUPPORTED for float32 and more than 64 rows; before Hopper for more than 16,
or where x does not fit into shared memory. K must be a multiple of 128, N of 16. The weight is
exact in T, sums and scales are float32. prefetch_safe as linear's, of weight and scales."""

LINEAR_FP8 = Kernel(
    name="linear_fp8",
    params="LinearFp8Params",
    doc=f"""y = x . (weight * scale)^T for a few rows of x; a scale serves one row, 128 rows or all,
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

QUANTISE_ROWS = Kernel(
    name="quantise_rows",
    params="QuantiseRowsParams",
    doc="""scale = largest |x| / 448 of a row, or of each 128 columns of it (1 where that
is below 1e-30);
q = x * (448 / largest), rounded to the nearest, packed as a weight: for stock FP8 products with
one. Or q = those numbers times scale, in T and in their own order: for products with few rows. K
must be a multiple of 128.""",
    tensors={
        "x": "T [M, K]",
        "q": "float8_e4m3fn [M, K], packed; or T [M, K]",
        "scale": "float32 [1 or K / 128, M]",
    },
    writes=("q", "scale"),
    scalars={},
    sizes="""
    int32_t num_rows;  // M
    int32_t inner;     // K
    int32_t groups;    // scales of a row
    int32_t rounds;    // whether q is T
    DType dtype;
    """,
)

PACKED_KERNELS = (
    LINEAR_FP8,
    LINEAR_INT8,
    LINEAR_INT4,
    UNPACK_FP8,
    UNPACK_INT8,
    UNPACK_INT4,
    QUANTISE_ROWS,
)


def linear_fp8_call(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    prefetch_safe: bool = False,
    out: Tensor | None = None,
) -> KernelCall[Tensor]:
    """``x @ (weight * scale).T`` for at most 64 rows.

    Args:
        x: T [M, K]. weight: float8_e4m3fn [N, K], packed. scale: float32, [N, ceil(N / 128) or 1
            rows, 1 or K / 128 columns].
        prefetch_safe: as of ``linear_call``, for weight and scale.
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
    """``x @ ((weight - 128) * scale).T`` for at most 64 rows; as ``linear_fp8_call``, of weight:
    uint8 [N, K], packed.
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
    """``x @ ((weight - zero_point) * scale).T`` for at most 64 rows.

    Args:
        x: T [M, K]. weight: int32 [N, K / 8], packed. scale: float16 or bfloat16 [N, K / group].
        zero_point: uint8 [N, K / group]; None is 8 for all.
        prefetch_safe: as of ``linear_call``, for weight, scale and zero_point.
    Raises:
        ValueError: a tensor does not fit; the message names it.
        NotImplementedError: float32, too many rows.
    """
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    tensors = {"x": x, "weight": weight, "scale": scale, "zero_point": zero_point, "y": out}
    return KernelCall(LINEAR_INT4, tensors, {"prefetch_safe": prefetch_safe}, out)


def unpack_fp8_call(
    weight: Tensor, scale: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
) -> KernelCall[Tensor]:
    """``weight * scale`` in ``dtype`` [N, K]."""
    out = weight.new_empty(weight.shape, dtype=dtype) if out is None else out
    return KernelCall(UNPACK_FP8, {"weight": weight, "scale": scale, "out": out}, {}, out)


def unpack_int8_call(
    weight: Tensor, scale: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
) -> KernelCall[Tensor]:
    """``(weight - 128) * scale`` in ``dtype`` [N, K]."""
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
    """``(weight - zero_point) * scale`` in ``dtype`` [N, K]."""
    rows, words = weight.shape
    out = weight.new_empty((rows, words * 8), dtype=dtype) if out is None else out
    tensors = {"weight": weight, "scale": scale, "zero_point": zero_point, "out": out}
    return KernelCall(UNPACK_INT4, tensors, {}, out)


def quantise_rows_call(x: Tensor, *, blocks: bool = False) -> KernelCall[tuple[Tensor, Tensor]]:
    """Rows of ``x [M, K]`` as packed float8_e4m3fn [M, K], and float32 scales [1, M], or
    [K / 128, M] with ``blocks``.
    """
    import torch

    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    groups = x.shape[1] // PACKED_COLUMNS if blocks else 1
    scale = torch.empty(groups, x.shape[0], dtype=torch.float32, device=x.device)
    return KernelCall(QUANTISE_ROWS, {"x": x, "q": q, "scale": scale}, {}, (q, scale))


def round_rows_call(x: Tensor, *, blocks: bool = False) -> KernelCall[Tensor]:
    """What ``quantise_rows`` makes of ``x [M, K]``, as values: T [M, K], each code times its scale
    rounded once.
    """
    call, rounded = quantise_rows_call(x, blocks=blocks), x.new_empty(x.shape)
    return KernelCall(QUANTISE_ROWS, {**call.tensors, "q": rounded}, {}, rounded)
