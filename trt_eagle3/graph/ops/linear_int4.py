"""``y = x . ((weight - zero_point) * scale)^T``: a Gemm with an INT4 weight, for a plugin.

No graph of ours contains it: ``engine/trt/packed_products.py`` substitutes it. Its constants are
int32 that hold bytes, because not every TensorRT has the types. One int32 has eight codes of four
bits in the order of ``plugins/kernels/packed_weight.cuh``, two scales of ``scale_type``, or four
zero points.

Shapes: G groups of 32, 64 or 128 columns; x T [n, K]; weight int32 [N, K / 8]; scale int32
[N / 2, G], the bytes of [N, G]; zero_point int32 [N / 4, G], also bytes, 8 if absent; y T [n, N].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.graph.ops.op import Op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["INT4_VALUES", "LINEAR_INT4", "int4_values", "linear_int4"]

_SPAN = 128  # columns that the kernels reorder as a unit
_BFLOAT16 = 16  # of ``TensorProto``; else FLOAT16


def linear_int4(
    x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, scale_type: int
) -> Tensor:
    """Compute ``x @ ((weight - zero_point) * scale).T``.

    ``scale_type``: 10 (float16) or 16 (bfloat16).
    """
    from torch.nn import functional

    return functional.linear(x, int4_values(weight, scale, zero_point, scale_type).to(x.dtype))


def int4_values(
    weight: Tensor, scale: Tensor, zero_point: Tensor | None, scale_type: int
) -> Tensor:
    """Compute ``(weight - zero_point) * scale``: float32 [N, K] in natural column order."""
    import torch

    rows, inner = weight.shape[0], weight.shape[1] * 8
    shifts = torch.arange(0, 32, 4, device=weight.device, dtype=torch.int32)
    codes = (weight[..., None] >> shifts) & 15
    # [lanes, 32s, two, 16s, halves] -> natural column order
    parts = codes.view(rows, inner // _SPAN, 4, 4, 2, 2, 2).permute(0, 1, 3, 5, 6, 2, 4)
    dtype = torch.bfloat16 if scale_type == _BFLOAT16 else torch.float16
    scales = scale.contiguous().view(dtype).view(rows, -1).float()
    group = inner // scales.shape[1]
    zeros = torch.full_like(scales, 8.0)
    if zero_point is not None:
        zeros = zero_point.contiguous().view(torch.uint8).view(rows, -1).float()
    about = parts.reshape(rows, inner).float() - zeros.repeat_interleave(group, 1)
    return about * scales.repeat_interleave(group, 1)


# A number of b bits is a word's remainder modulo 2^b: opset 17 cannot shift int32. Mod takes the
# divisor's sign, so negative words are handled as unsigned.
def _cut(word: str, name: str, base: str, count: int) -> str:
    """Build int32 [..., count] ``name``: the digits of ``word`` in ``base``, lowest first."""
    lines, rest = [], word
    for place in range(count):
        part = f"{name}{place}"
        lines += [
            f"{part} = Mod ({rest}, {base})",
            f"{part}_less = Sub ({rest}, {part})",
            f"{part}_rest = Div ({part}_less, {base})",
            f"{part}_one = Unsqueeze ({part}, last)",
        ]
        rest = f"{part}_rest"
    ones = ", ".join(f"{name}{place}_one" for place in range(count))
    return "\n".join([*lines, f"{name} = Concat <axis = -1> ({ones})"])


_CODES = f"""
    last = Constant <value_ints = [-1]> ()
    sixteen = Constant <value_int = 16> ()
    base4 = Cast <to = 6> (sixteen)
    {_cut("weight", "nibbles", "base4", 8)}
    lanes_shape = Constant <value_ints = [0, -1, 4, 4, 2, 2, 2]> ()
    lanes = Reshape (nibbles, lanes_shape)
    ordered = Transpose <perm = [0, 1, 3, 5, 6, 2, 4]> (lanes)
    rows_shape = Constant <value_ints = [0, -1]> ()
    flat = Reshape (ordered, rows_shape)
    codes = Cast <to = 1> (flat)
    words_shape = Shape (weight)
    zero_1 = Constant <value_ints = [0]> ()
    num_rows = Gather <axis = 0> (words_shape, zero_1)
    grid_shape = Concat <axis = 0> (num_rows, last)
"""
# 16 bits as a number: float16 has 5 bits of exponent and 10 of fraction, bfloat16 has 8 and 7.
_SCALES = f"""
    many = Constant <value_int = 65536> ()
    base16 = Cast <to = 6> (many)
    {_cut("scale", "halves", "base16", 2)}
    bits_2d = Reshape (halves, grid_shape)
    bits = Cast <to = 1> (bits_2d)
    scale_type = Constant <value_int : int = @scale_type> ()
    bfloat16 = Constant <value_int = 16> ()
    is_bfloat16 = Equal (scale_type, bfloat16)
    one = Constant <value_float = 1.0> ()
    two = Constant <value_float = 2.0> ()
    steps_16 = Constant <value_float = 128.0> ()
    steps_half = Constant <value_float = 1024.0> ()
    steps = Where (is_bfloat16, steps_16, steps_half)
    bias_16 = Constant <value_float = 134.0> ()
    bias_half = Constant <value_float = 25.0> ()
    bias = Where (is_bfloat16, bias_16, bias_half)
    parts = Div (bits, steps)
    exponent = Floor (parts)
    whole = Mul (exponent, steps)
    fraction = Sub (bits, whole)
    is_normal = GreaterOrEqual (exponent, one)
    with_one = Add (fraction, steps)
    significand = Where (is_normal, with_one, fraction)
    at_least = Max (exponent, one)
    power = Sub (at_least, bias)
    unit = Pow (two, power)
    scales = Mul (significand, unit)
    axis_2 = Constant <value_ints = [2]> ()
    scales_3 = Unsqueeze (scales, axis_2)
    by_group_shape = Shape (scales)
    grouped_shape = Concat <axis = 0> (by_group_shape, last)
    grouped = Reshape (codes, grouped_shape)
"""
_EIGHT = "zeros_3 = Constant <value_float = 8.0> ()"
_ZEROS = f"""
    full = Constant <value_int = 256> ()
    base8 = Cast <to = 6> (full)
    {_cut("zero_point", "bytes", "base8", 4)}
    zeros_2d = Reshape (bytes, grid_shape)
    zeros = Cast <to = 1> (zeros_2d)
    zeros_3 = Unsqueeze (zeros, axis_2)
"""
_SCALED = """
    about = Sub (grouped, zeros_3)
    scaled_3 = Mul (about, scales_3)
    scaled = Reshape (scaled_3, rows_shape)
"""
_PRODUCT = """
    w = CAST (scaled)
    y = Gemm <transB = 1> (x, w)
"""
INT4_VALUES = {
    "": _CODES + _SCALES + _EIGHT + _SCALED,
    "zeros": _CODES + _SCALES + _ZEROS + _SCALED,
}
"""Nodes that compute ``scaled``, float32 [N, K], by overload."""
_INPUTS = ("x", "weight", "scale")


def _lowerings(cast: str) -> dict[str, str]:
    product = _PRODUCT.replace("CAST (scaled)", cast)
    return {overload: values + product for overload, values in INT4_VALUES.items()}


LINEAR_INT4 = Op(
    inputs={"": _INPUTS, "zeros": (*_INPUTS, "zero_point")},
    outputs={"": ("y",), "zeros": ("y",)},
    attributes={"": ("scale_type",), "zeros": ("scale_type",)},
    types=dict.fromkeys(("weight", "scale", "zero_point"), "int32"),
    lowering=_lowerings("CastLike (scaled, x)"),
    lowering_17=_lowerings("Cast <to = TYPE> (scaled)"),
    torch_function=linear_int4,
    plugin="LinearInt4",
)
