"""Keys and values as FP8: e4m3 numbers, one byte each, times their head's scale.

    stored = e4m3(clip(x * (1 / scale), -448, 448)),  x = stored * scale

Inverse and product are float32, rounding is to nearest even. A row's bytes depend only on the row.
The e4m3 type is OFP8's (bias 7, largest 448, no infinities): Micikevicius et al. 2022, arXiv
2209.05433.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.dtype import LARGEST_FP8

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["decode", "decode_lowering", "encode", "encode_lowering"]


_EXPONENTS = range(-6, 9)  # of normal numbers; subnormals have the steps of the first


def encode(x: Tensor, scales: Tensor) -> Tensor:
    """Encode ``x`` [..., Hkv, D] to e4m3, uint8 [..., Hkv, D]; ``scales``: float32 [Hkv]."""
    import torch

    held = (x.float() * scales.reciprocal()[:, None]).clamp(-LARGEST_FP8, LARGEST_FP8)
    return held.to(torch.float8_e4m3fn).view(torch.uint8)


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode uint8 ``codes`` to ``dtype`` [..., Hkv, D]; ``scales``: float32 [Hkv]."""
    import torch

    return (codes.view(torch.float8_e4m3fn).float() * scales[:, None]).to(dtype)


def encode_lowering(x: str, codes: str, kind: int) -> str:
    """Build nodes from ``x`` [n, Hkv, D] to uint8 ``codes``; ``kind``: row of ``kv_scales``.

    ONNX has no node that reads a number's bits. So a code is computed as 8 for each power of two
    from the second on that the number reaches, plus its steps above the last power. 16 steps equal
    the first step of the next power.
    """
    bounds = ", ".join(str(2.0**e) for e in _EXPONENTS)
    steps = ", ".join(str(2.0 ** (max(e, _EXPONENTS[0]) - 3)) for e in (-7, *_EXPONENTS))
    return f"""
    {x}_f32 = Cast <to = 1> ({x}){_scale(x, kind)}
    {x}_inverse = Reciprocal ({x}_scale)
    {x}_scaled = Mul ({x}_f32, {x}_inverse)
    {x}_size = Abs ({x}_scaled)
    {x}_zero = Constant <value_float = 0.0> ()
    {x}_one = Constant <value_float = 1.0> ()
    {x}_eight = Constant <value_float = 8.0> ()
    {x}_half = Constant <value_float = 128.0> ()
    {x}_most = Constant <value_float = {LARGEST_FP8}> ()
    {x}_held = Min ({x}_size, {x}_most)
    {x}_last = Constant <value_ints = [-1]> ()
    {x}_column = Unsqueeze ({x}_held, {x}_last)
    {x}_bounds = Constant <value_floats = [{bounds}]> ()
    {x}_reached = GreaterOrEqual ({x}_column, {x}_bounds)
    {x}_ones = Cast <to = 1> ({x}_reached)
    {x}_power = ReduceSum <keepdims = 0> ({x}_ones, {x}_last)
    {x}_power_index = Cast <to = 6> ({x}_power)
    {x}_step_table = Constant <value_floats = [{steps}]> ()
    {x}_step = Gather <axis = 0> ({x}_step_table, {x}_power_index)
    {x}_quotient = Div ({x}_held, {x}_step)
    {x}_steps = Round ({x}_quotient)
    {x}_past_first = Sub ({x}_power, {x}_one)
    {x}_eights = Max ({x}_past_first, {x}_zero)
    {x}_from = Mul ({x}_eights, {x}_eight)
    {x}_unsigned = Add ({x}_from, {x}_steps)
    {x}_negative = Less ({x}_scaled, {x}_zero)
    {x}_signed = Add ({x}_unsigned, {x}_half)
    {x}_code = Where ({x}_negative, {x}_signed, {x}_unsigned)
    {codes} = Cast <to = 2> ({x}_code)"""


def decode_lowering(codes: str, x: str, kind: int, *, like: str) -> str:
    """Build nodes from uint8 ``codes`` [..., Hkv, D] to ``x``, of the type of ``like``."""
    table = ", ".join(map(str, _values()))
    return f"""{_scale(codes, kind)}
    {codes}_index = Cast <to = 6> ({codes})
    {codes}_table = Constant <value_floats = [{table}]> ()
    {codes}_plain = Gather <axis = 0> ({codes}_table, {codes}_index)
    {codes}_f32 = Mul ({codes}_plain, {codes}_scale)
    {x} = CastLike ({codes}_f32, {like})"""


def _scale(prefix: str, kind: int) -> str:
    """Build ``<prefix>_scale`` float32 [1, Hkv, 1]."""
    return f"""
    {prefix}_kind = Constant <value_ints = [{kind}]> ()
    {prefix}_by_head = Gather <axis = 0> (kv_scales, {prefix}_kind)
    {prefix}_axis = Constant <value_ints = [2]> ()
    {prefix}_scale = Unsqueeze ({prefix}_by_head, {prefix}_axis)"""


def _values() -> list[float]:
    """Return the value of each byte. NaN's byte has the value 480."""
    sizes = [2.0 ** (max(b >> 3, 1) - 7) * ((b & 7) / 8 + (b > 7)) for b in range(128)]
    return [*sizes, *(-size for size in sizes)]
