"""Kernels that make rows of eight bits, for products of bytes (``linear_w8a8`` and stock ones).

Shapes: M rows, K columns. T is float16 or bfloat16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trt_eagle3.graph.ops.kernel import Kernel, KernelCall

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "MAX_QUANTISED_NORM",
    "QUANTISE_KERNELS",
    "RowCodes",
    "quantise_add_rms_norm_call",
    "quantise_rows_call",
    "quantise_silu_mul_call",
    "round_add_rms_norm_call",
    "round_rows_call",
    "round_silu_mul_call",
]

MAX_QUANTISED_NORM = 8192  # columns
_GROUP = 128  # columns that share a scale, if a row has several scales

_CODES = {
    "q": "float8_e4m3fn or int8 [M, K], packed; or T [M, K]",
    "scale": "float32 [1 or K / 128, M]; for int8 [2, M]",
}
_SIZES = """
    int32_t num_rows;  // M
    int32_t inner;     // K
    int32_t groups;    // scales of a row
    int32_t rounds;    // whether q is T
    int32_t integers;  // whether q is int8
    DType dtype;
    """

QUANTISE_ROWS = Kernel(
    name="quantise_rows",
    params="QuantiseRowsParams",
    doc="""scale = largest |x| / 448 of a row, or of each 128 columns of it (1 if that is below
1e-30). For FP8 products with a weight, q = x * (448 / largest), rounded to the nearest, packed as
a weight. For products with few rows, q = those numbers times scale, in T and in their own order.
For int8 the largest number is 127 instead of 448, scales are by row only, and scale's second row is
the sum of q. K must be a multiple of 128.""",
    tensors={"x": "T [M, K]", **_CODES},
    writes=("q", "scale"),
    scalars={},
    sizes=_SIZES,
)

QUANTISE_SILU_MUL = Kernel(
    name="quantise_silu_mul",
    params="QuantiseSiluMulParams",
    doc="quantise_rows of the output of silu_mul, rounded to T.",
    tensors={"gate_up": "T [M, 2 * K]", **_CODES},
    writes=("q", "scale"),
    scalars={},
    sizes=_SIZES,
)

QUANTISE_ADD_RMS_NORM = Kernel(
    name="quantise_add_rms_norm",
    params="QuantiseAddRmsNormParams",
    doc="""quantise_rows of the y of add_rms_norm, rounded to T; TE3_NOT_SUPPORTED for more
than 8192 columns.""",
    tensors={
        "x": "T [M, K]",
        "residual": "T [M, K], or null data with sum's",
        "weight": "T [K]",
        **_CODES,
        "sum": "T [M, K]",
    },
    writes=("q", "scale", "sum"),
    scalars={"epsilon": (float, "")},
    sizes=_SIZES,
)

QUANTISE_KERNELS = (QUANTISE_ROWS, QUANTISE_SILU_MUL, QUANTISE_ADD_RMS_NORM)


class RowCodes(NamedTuple):
    """Rows in eight bits.

    Attributes:
        q: float8_e4m3fn or int8 [M, K], packed.
        scale: float32 [1, M]; with a scale for each 128 columns [K / 128, M]; for int8 [2, M], the
            second row being the sums of the rows' numbers.
    """

    q: Tensor
    scale: Tensor


def _empty(
    rows: int, columns: int, device: torch.device, *, blocks: bool, integers: bool
) -> RowCodes:
    import torch

    dtype = torch.int8 if integers else torch.float8_e4m3fn
    scales = 2 if integers else columns // _GROUP if blocks else 1
    q = torch.empty(rows, columns, dtype=dtype, device=device)
    return RowCodes(q, torch.empty(scales, rows, dtype=torch.float32, device=device))


def quantise_rows_call(
    x: Tensor, *, blocks: bool = False, integers: bool = False
) -> KernelCall[RowCodes]:
    """Quantise ``x [M, K]``; ``blocks``: a scale for each 128 columns; ``integers``: as int8."""
    codes = _empty(x.shape[0], x.shape[1], x.device, blocks=blocks, integers=integers)
    return KernelCall(QUANTISE_ROWS, {"x": x, **codes._asdict()}, {}, codes)


def quantise_silu_mul_call(
    gate_up: Tensor, *, blocks: bool = False, integers: bool = False
) -> KernelCall[RowCodes]:
    """Quantise ``silu(gate) * up`` of ``gate_up [M, 2 K]``; see ``quantise_rows_call``."""
    rows, columns = gate_up.shape
    codes = _empty(rows, columns // 2, gate_up.device, blocks=blocks, integers=integers)
    return KernelCall(QUANTISE_SILU_MUL, {"gate_up": gate_up, **codes._asdict()}, {}, codes)


def quantise_add_rms_norm_call(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    *,
    epsilon: float,
    blocks: bool = False,
    integers: bool = False,
) -> KernelCall[tuple[RowCodes, Tensor | None]]:
    """Quantise ``RMSNorm(x + residual) * weight``, and compute ``x + residual``; see
    ``quantise_rows_call``.

    Raises:
        NotImplementedError: more than 8192 columns.
    """
    import torch

    codes = _empty(x.shape[0], x.shape[1], x.device, blocks=blocks, integers=integers)
    total = None if residual is None else torch.empty_like(residual)
    tensors = {"x": x, "residual": residual, "weight": weight, **codes._asdict(), "sum": total}
    return KernelCall(QUANTISE_ADD_RMS_NORM, tensors, {"epsilon": epsilon}, (codes, total))


def round_rows_call(x: Tensor, *, blocks: bool = False) -> KernelCall[Tensor]:
    """Return the rounded values T [M, K] of ``quantise_rows`` for ``x [M, K]``: each code times its
    scale, rounded once.
    """
    call, rounded = quantise_rows_call(x, blocks=blocks), x.new_empty(x.shape)
    return KernelCall(QUANTISE_ROWS, {**call.tensors, "q": rounded}, {}, rounded)


def round_silu_mul_call(gate_up: Tensor, *, blocks: bool = False) -> KernelCall[Tensor]:
    """Compute ``round_rows_call`` of the output of ``silu_mul``."""
    call = quantise_silu_mul_call(gate_up, blocks=blocks)
    rounded = gate_up.new_empty(call.result.q.shape)
    return KernelCall(QUANTISE_SILU_MUL, {**call.tensors, "q": rounded}, {}, rounded)


def round_add_rms_norm_call(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    *,
    epsilon: float,
    blocks: bool = False,
) -> KernelCall[tuple[Tensor, Tensor | None]]:
    """Compute ``round_rows_call`` of ``RMSNorm(x + residual) * weight``, and ``x + residual``."""
    call = quantise_add_rms_norm_call(x, weight, residual, epsilon=epsilon, blocks=blocks)
    rounded = x.new_empty(x.shape)
    tensors = {**call.tensors, "q": rounded}
    return KernelCall(QUANTISE_ADD_RMS_NORM, tensors, call.scalars, (rounded, call.result[1]))
