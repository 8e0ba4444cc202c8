"""``y = x . (weight * scale)^T``: a Gemm with an FP8 weight, for a plugin.

No graph of ours contains it: ``engine/trt/packed_products.py`` substitutes it. The weight's bytes
are in the order of ``plugins/kernels/packed_weight.cuh``, four per int32, because not every
TensorRT has FP8.

Shapes: x T [n, K]; weight int32 [N, K / 4]; scale float32 [N or ceil(N / 128) or 1, 1 or K / 128];
y T [n, N].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.graph.ops.op import Op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BYTES",
    "LINEAR_FP8",
    "NUMBERS",
    "PRODUCT",
    "PRODUCT_17",
    "SCALES",
    "byte_linear",
    "byte_values",
    "linear_fp8",
]

_SPAN = 64  # columns that the kernels reorder as a unit


def linear_fp8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Compute ``x @ (weight * scale).T``."""
    import torch

    return byte_linear(x, weight.contiguous().view(torch.float8_e4m3fn).float(), scale)


def byte_linear(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Compute ``x @ (codes * scale).T``; codes: float32 [N, K], in the kernels' column order."""
    from torch.nn import functional

    return functional.linear(x, byte_values(codes, scale).to(x.dtype))


def byte_values(codes: Tensor, scale: Tensor) -> Tensor:
    """Compute ``codes * scale`` [N, K] in natural column order; codes have the kernels' order."""
    rows, inner = codes.shape
    # [lanes, 16s, halves, pairs] -> natural column order
    ordered = codes.view(rows, inner // _SPAN, 4, 4, 2, 2).permute(0, 1, 3, 4, 2, 5)
    each = scale.repeat_interleave(inner // scale.shape[1], 1)
    block = rows if len(scale) == 1 else 1 if len(scale) == rows else 128
    return ordered.reshape(rows, inner) * each.repeat_interleave(block, 0)[:rows]


# A byte is a word's remainder modulo 256: opset 17 cannot shift int32.
BYTES = """
    base = Constant <value_int = 256> ()
    base32 = Cast <to = 6> (base)
    byte0 = Mod (weight, base32)
    rest0 = Sub (weight, byte0)
    word1 = Div (rest0, base32)
    byte1 = Mod (word1, base32)
    rest1 = Sub (word1, byte1)
    word2 = Div (rest1, base32)
    byte2 = Mod (word2, base32)
    rest2 = Sub (word2, byte2)
    word3 = Div (rest2, base32)
    byte3 = Mod (word3, base32)
    last = Constant <value_ints = [-1]> ()
    one0 = Unsqueeze (byte0, last)
    one1 = Unsqueeze (byte1, last)
    one2 = Unsqueeze (byte2, last)
    one3 = Unsqueeze (byte3, last)
    bytes = Concat <axis = -1> (one0, one1, one2, one3)
    lanes_shape = Constant <value_ints = [0, -1, 4, 4, 2, 2]> ()
    lanes = Reshape (bytes, lanes_shape)
    ordered = Transpose <perm = [0, 1, 3, 4, 2, 5]> (lanes)
    rows_shape = Constant <value_ints = [0, -1]> ()
    flat = Reshape (ordered, rows_shape)
    codes = Cast <to = 1> (flat)
"""
# A byte has a sign, four bits of exponent with a bias of 7, and a fraction of three bits.
NUMBERS = """
    half = Constant <value_float = 128.0> ()
    eight = Constant <value_float = 8.0> ()
    one = Constant <value_float = 1.0> ()
    two = Constant <value_float = 2.0> ()
    ten = Constant <value_float = 10.0> ()
    is_positive = Less (codes, half)
    minus_half = Sub (codes, half)
    magnitude = Where (is_positive, codes, minus_half)
    eighths = Div (magnitude, eight)
    exponent = Floor (eighths)
    whole = Mul (exponent, eight)
    fraction = Sub (magnitude, whole)
    is_normal = GreaterOrEqual (exponent, one)
    with_one = Add (fraction, eight)
    significand = Where (is_normal, with_one, fraction)
    at_least = Max (exponent, one)
    power = Sub (at_least, ten)
    unit = Pow (two, power)
    unsigned = Mul (significand, unit)
    negative = Neg (unsigned)
    values = Where (is_positive, unsigned, negative)
"""
# A row has its own scale, that of its block of 128, or the only one. So has a column.
SCALES = """
    span = Constant <value_int = 128> ()
    none = Constant <value_int = 0> ()
    step = Constant <value_int = 1> ()
    weight_shape = Shape (weight)
    values_shape = Shape (values)
    scale_shape = Shape (scale)
    num_rows = Gather <axis = 0> (weight_shape, none)
    inner = Gather <axis = 0> (values_shape, step)
    scale_rows = Gather <axis = 0> (scale_shape, none)
    scale_columns = Gather <axis = 0> (scale_shape, step)
    is_by_row = Equal (scale_rows, num_rows)
    block = Where (is_by_row, step, span)
    all_rows = Range (none, num_rows, step)
    row_blocks = Div (all_rows, block)
    last_row = Sub (scale_rows, step)
    row_of = Min (row_blocks, last_row)
    all_columns = Range (none, inner, step)
    column_blocks = Div (all_columns, span)
    last_column = Sub (scale_columns, step)
    column_of = Min (column_blocks, last_column)
    tall = Gather <axis = 0> (scale, row_of)
    grid = Gather <axis = 1> (tall, column_of)
    scaled = Mul (values, grid)
"""
PRODUCT = "w = CastLike (scaled, x) y = Gemm <transB = 1> (x, w)"
PRODUCT_17 = "w = Cast <to = TYPE> (scaled) y = Gemm <transB = 1> (x, w)"

LINEAR_FP8 = Op(
    inputs={"": ("x", "weight", "scale")},
    outputs={"": ("y",)},
    types={"weight": "int32", "scale": "float32"},
    lowering={"": BYTES + NUMBERS + SCALES + PRODUCT},
    lowering_17={"": BYTES + NUMBERS + SCALES + PRODUCT_17},
    torch_function=linear_fp8,
    plugin="LinearFp8",
)
