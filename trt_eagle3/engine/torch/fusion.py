"""Fused launches of the torch session on CUDA: two graph nodes in one kernel, and kernels of
single nodes.

Shapes: n rows, H hidden.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trt_eagle3.engine import capi
from trt_eagle3.engine.torch.ops import STANDARD_OPS, Function, gelu
from trt_eagle3.engine.torch.packed import PackedWeight
from trt_eagle3.engine.torch.product_rows import NormRows, SiluMulRows

__all__ = ["Step", "fused", "gemm", "layer_norm"]


@dataclass(frozen=True)
class Step:
    """One node: its function, inputs and outputs, and the values that no later node needs."""

    function: Function
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    done_with: tuple[str, ...] = ()
    op: str = ""


def fused(
    steps: Sequence[Step], kept: Collection[str], byte_weights: Collection[str] = ()
) -> list[Step]:
    """Return ``steps`` with fusible pairs joined.

    Joined are a product and its GELU, a sum and its LayerNorm, and a product with the node that
    makes its rows. The last needs a weight in ``byte_weights``, which may take rows in eight bits.
    Values in ``kept`` are still computed.
    """
    readers = Counter(name for step in steps for name in step.inputs)
    made_by = {step.outputs[0]: i for i, step in enumerate(steps)}
    joined: dict[int, Step | None] = {}
    for i, step in enumerate(steps):
        first = made_by.get(step.inputs[0])
        if first is None or first in joined:
            continue
        before = steps[first]
        alone = readers[before.outputs[0]] == 1 and before.outputs[0] not in kept
        if before.op in _ROWS_OF and step.function is gemm and step.inputs[1] in byte_weights:
            between = {name for other in steps[first:i] for name in other.inputs}
            if alone and not between.intersection(before.outputs):
                joined[first], joined[i] = None, _rows_of_product(before, step)
        elif _is_gelu_of_gemm(before, step) and alone:
            joined[first], joined[i] = None, Step(_gemm_gelu, before.inputs, step.outputs, {})
        elif step.function is layer_norm and before.function is torch.add:
            inputs = (*before.inputs, *step.inputs[1:])
            outputs = (*before.outputs, *step.outputs)
            joined[first], joined[i] = Step(_add_layer_norm, inputs, outputs, step.attributes), None
    found = (joined.get(i, step) for i, step in enumerate(steps))
    return [step for step in found if step is not None]


def _is_gelu_of_gemm(before: Step, step: Step) -> bool:
    tanh = step.function is gelu and step.attributes.get("approximate") == b"tanh"
    return (
        tanh
        and before.function is gemm
        and len(before.inputs) == 3
        and before.attributes.get("transB") == 1
    )


def _rows_of_product(before: Step, product: Step) -> Step:
    """Join the node that makes the rows with the product, at the product's position."""
    inputs = (product.inputs[1], *before.inputs)
    outputs = (*product.outputs, *before.outputs[1:])
    return Step(_ROWS_OF[before.op], inputs, outputs, before.attributes)


def _silu_mul_gemm(weight: PackedWeight, gate_up: Tensor) -> Tensor:
    return weight.product(SiluMulRows(gate_up))


def _norm_gemm(
    weight: PackedWeight,
    x: Tensor,
    norm: Tensor,
    residual: Tensor | None = None,
    *,
    epsilon: float,
) -> Tensor | tuple[Tensor, Tensor]:
    rows = NormRows(x, norm, residual, epsilon=epsilon)
    y = weight.product(rows)
    return y if rows.total is None else (y, rows.total)


_ROWS_OF: Mapping[str, Function] = {"SiluMul": _silu_mul_gemm, "AddRmsNorm": _norm_gemm}


def gemm(
    x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None, *, transB: int = 0
) -> Tensor:
    """Compute ``Gemm``. Our kernel takes few rows, at the cost of reading the weight; torch the
    rest.
    """
    if isinstance(weight, PackedWeight):
        assert bias is None, "a packed weight has no bias"
        return weight.linear(x)
    if bias is None and transB and x.shape[0] <= capi.MAX_LINEAR_ROWS and x.dtype != torch.float32:
        with contextlib.suppress(NotImplementedError):
            # weights are written before any graph runs
            return capi.linear(x, weight, prefetch_safe=True)
    product: Tensor = STANDARD_OPS["Gemm"](x, weight, bias, transB=transB)
    return product


def layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor, *, axis: int = -1, epsilon: float = 1e-5
) -> Tensor:
    """Compute ``LayerNormalization`` of ``x [n, H]``."""
    assert axis == -1, f"LayerNormalization: axis -1, got {axis}"
    return capi.add_layer_norm(x, scale, bias, epsilon=epsilon)[0]


def _add_layer_norm(
    x: Tensor,
    residual: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Return the sum, and its LayerNorm."""
    assert axis == -1, f"LayerNormalization: axis -1, got {axis}"
    normed, total = capi.add_layer_norm(x, scale, bias, residual, epsilon=epsilon)
    assert total is not None
    return total, normed


def _gemm_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute ``gelu(x @ weight.T + bias)`` by tanh, in one launch. cuBLAS applies it to the sums
    before they are rounded.
    """
    product: Tensor = torch._addmm_activation(bias, x, weight.T, use_gelu=True)
    return product
