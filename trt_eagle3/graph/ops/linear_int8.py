"""``y = x . ((weight - 128) * scale)^T``: a Gemm with an INT8 weight, for a plugin.

Inputs and their shapes are those of ``linear_fp8.py``, with INT8 numbers in the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.graph.ops.linear_fp8 import BYTES, PRODUCT, PRODUCT_17, SCALES, byte_linear
from trt_eagle3.graph.ops.op import Op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LINEAR_INT8", "linear_int8"]


def linear_int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Compute ``x @ ((weight - 128) * scale).T``."""
    import torch

    return byte_linear(x, weight.contiguous().view(torch.uint8).float() - 128, scale)


_NUMBERS = """
    zero_point = Constant <value_float = 128.0> ()
    values = Sub (codes, zero_point)
"""

LINEAR_INT8 = Op(
    inputs={"": ("x", "weight", "scale")},
    outputs={"": ("y",)},
    types={"weight": "int32", "scale": "float32"},
    lowering={"": BYTES + _NUMBERS + SCALES + PRODUCT},
    lowering_17={"": BYTES + _NUMBERS + SCALES + PRODUCT_17},
    torch_function=linear_int8,
    plugin="LinearInt8",
)
