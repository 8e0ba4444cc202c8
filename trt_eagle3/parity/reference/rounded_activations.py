"""Rounded activations: inputs of quantised weights, rounded as an INT8 or FP8 engine rounds them.

Each row has its own scale. Shapes: ... rows, K columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.dtype import LARGEST_FP8

__all__ = ["ROUNDED", "round_inputs"]

_LEAST = 1e-12  # scale of a row of zeros


def _int8(x: Tensor) -> Tensor:
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=_LEAST) / 127
    return (x / scale).round() * scale


def _fp8(x: Tensor) -> Tensor:
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=_LEAST) / LARGEST_FP8
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


ROUNDED: Mapping[str, Callable[[Tensor], Tensor]] = {"int8": _int8, "fp8": _fp8}
"""Maps ``engine.activations`` to a function that rounds x [..., K] in float32."""


def round_inputs(
    module: nn.Module, prefix: str, tensors: Mapping[str, TensorRef], activations: str
) -> None:
    """Round the inputs of ``module``'s products with quantised weights from now on.

    Args:
        prefix: of the module's weights in ``tensors``.
        activations: the value of ``engine.activations``.
    """
    rounded = ROUNDED.get(activations)

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        assert rounded is not None
        x: Tensor = inputs[0]
        return (rounded(x.float()).to(x.dtype), *inputs[1:])

    for name, part in module.named_modules():
        ref = tensors.get(f"{prefix}{name}.weight")
        if rounded is not None and isinstance(part, nn.Linear) and isinstance(ref, QuantisedRef):
            part.register_forward_pre_hook(before)
