"""Standard ops of our graphs in torch, on the CPU and on CUDA: op -> function.

64-bit integer tensors are shapes and scalar indices. They stay on the CPU, so that no shape waits
for the device. Our own ops are in ``graph/ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trt_eagle3.dtype import dtype_of_onnx

__all__ = ["STANDARD_OPS", "Function"]

Function = Callable[..., Any]
"""``f(*inputs, **attributes) -> output or tuple of outputs``."""


def _gather(data: Tensor, index: Tensor, *, axis: int = 0) -> Tensor:
    if index.ndim == 0 and index.device.type == "cpu":
        return data.select(axis, int(index))
    flat = data.index_select(axis, index.flatten().to(data.device))
    return flat.unflatten(axis, index.shape) if index.ndim != 1 else flat


def _reshape(data: Tensor, shape: Tensor) -> Tensor:
    return data.reshape([data.shape[i] if d == 0 else d for i, d in enumerate(shape.tolist())])


def _pad(data: Tensor, pads: Tensor) -> Tensor:
    begins, ends = pads.view(2, -1).tolist()
    by_axis = [size for pair in zip(begins, ends, strict=True) for size in reversed(pair)]
    return functional.pad(data, by_axis[::-1])


def _split(data: Tensor, sizes: Tensor, *, axis: int = 0) -> tuple[Tensor, ...]:
    return torch.split(data, sizes.tolist(), dim=axis)


def _gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transB: int = 0) -> Tensor:
    return functional.linear(x, weight if transB else weight.T, bias)


def _shape(data: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(data.shape[start:end], dtype=torch.int64)


def _unsqueeze(data: Tensor, axes: Tensor) -> Tensor:
    rank = data.ndim + len(axes)
    for axis in sorted(a % rank for a in axes.tolist()):
        data = data.unsqueeze(axis)
    return data


def gelu(x: Tensor, *, approximate: bytes = b"none") -> Tensor:
    """Compute GELU, exactly or by tanh."""
    return functional.gelu(x, approximate=approximate.decode())


def _layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor, *, axis: int = -1, epsilon: float = 1e-5
) -> Tensor:
    assert axis == -1, f"LayerNormalization: axis -1, got {axis}"
    return functional.layer_norm(x, scale.shape, scale, bias, epsilon)


def _conv(
    x: Tensor,
    weight: Tensor,
    *,
    kernel_shape: list[int],
    pads: list[int],
    strides: list[int],
) -> Tensor:
    """Convolve without a bias, with equal padding on opposite sides.

    It is a matrix product, because torch rounds float32 convolutions on a GPU to TF32.
    """
    (top, left, bottom, right), (down, across) = pads, strides
    assert (top, left) == (bottom, right), f"Conv: pads {pads}"
    size = (kernel_shape[0], kernel_shape[1])
    columns = functional.unfold(x, size, padding=(top, left), stride=(down, across))
    rows = (x.shape[2] + 2 * top - size[0]) // down + 1
    return torch.matmul(weight.flatten(1), columns).reshape(len(x), len(weight), rows, -1)


STANDARD_OPS: Mapping[str, Function] = {
    "Add": torch.add,
    "Clip": torch.clamp,
    "Cast": lambda x, *, to: x.to(dtype_of_onnx(to).torch),
    "Concat": lambda *parts, axis: torch.cat(parts, dim=axis),
    "Conv": _conv,
    "Cos": torch.cos,
    "Div": torch.div,
    "Erf": torch.erf,
    "Gather": _gather,
    "Gelu": gelu,
    "Gemm": _gemm,
    "LayerNormalization": _layer_norm,
    "MatMul": torch.matmul,
    "Mul": torch.mul,
    "Pad": _pad,
    "Reshape": _reshape,
    "Shape": _shape,
    "Sigmoid": torch.sigmoid,
    "Sin": torch.sin,
    "Softmax": lambda x, *, axis: torch.softmax(x, dim=axis),
    "Split": _split,
    "Sub": torch.sub,
    "Tanh": torch.tanh,
    "Transpose": lambda x, *, perm: x.permute(perm),
    "Unsqueeze": _unsqueeze,
    "Where": torch.where,
}
"""Operators of the default domain in the forms that our graphs use."""
