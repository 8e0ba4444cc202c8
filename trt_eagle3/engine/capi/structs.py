"""The C library's structs in ctypes, generated from the descriptions of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache
from struct import Struct
from typing import TYPE_CHECKING, Any

from trt_eagle3.graph.ops.kernel import MAX_RANK, ElementType, Kernel, KernelCall

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["TensorStruct", "argument_struct", "arguments_of"]


class TensorStruct(Structure):
    """``te3_tensor``."""

    _fields_ = (
        ("data", c_void_p),
        ("dtype", c_int32),
        ("rank", c_int32),
        ("shape", c_int64 * MAX_RANK),
    )


@cache
def argument_struct(kernel: Kernel) -> type[Structure]:
    """Return ``te3_<name>_args``: the tensors, then the scalars."""
    fields: list[tuple[str, Any]] = [(name, TensorStruct) for name in kernel.tensors]
    for name, (kind, _) in kernel.scalars.items():
        fields.append((name, c_float if kind is float else c_int32))
    return type(f"te3_{kernel.name}_args", (Structure,), {"_fields_": tuple(fields)})


def arguments_of(call: KernelCall[Any]) -> Structure:
    """Return the arguments of ``call``; missing ones are null or 0.

    Raises:
        ValueError: a tensor is not contiguous, has too many axes, or a dtype without a kernel.
    """
    # as few operations as possible: a prompt has many launches, and the device waits for the host
    kernel, tensors = call.kernel, call.tensors
    pack, struct, dtypes, values = *_layout(kernel), _dtypes(), list[float]()
    for name in kernel.tensors:
        tensor = tensors.get(name)
        if tensor is None:
            values += _NULL
            continue
        dtype, shape = dtypes.get(tensor.dtype), tensor.shape
        rank = len(shape)
        if dtype is None or rank > MAX_RANK or not tensor.is_contiguous():
            raise ValueError(_refusal(name, tensor))
        values += (tensor.data_ptr(), dtype, rank, *shape, *_PADDING[rank])
    if kernel.scalars:
        values += [call.scalars.get(name, 0) for name in kernel.scalars]
    return struct.from_buffer_copy(pack(*values))


_NULL = (0,) * (3 + MAX_RANK)
_PADDING = tuple((0,) * (MAX_RANK - rank) for rank in range(MAX_RANK + 1))


@cache
def _layout(kernel: Kernel) -> tuple[Callable[..., bytes], type[Structure]]:
    """Return the packing function of ``argument_struct``, with its end aligned, and the struct."""
    scalars = ("f" if kind is float else "i" for kind, _ in kernel.scalars.values())
    packing = Struct("@" + f"Pii{MAX_RANK}q" * len(kernel.tensors) + "".join(scalars) + "0q")
    return packing.pack, argument_struct(kernel)


@cache
def _dtypes() -> Mapping[torch.dtype, int]:
    import torch

    return {getattr(torch, dtype.name.lower()): int(dtype) for dtype in ElementType}


def _refusal(name: str, tensor: Tensor) -> str:
    """Return why no kernel takes the tensor."""
    if tensor.dtype not in _dtypes():
        known = ", ".join(map(str, _dtypes()))
        return f"{name}: expected one of {known}, got {tensor.dtype}"
    if tensor.ndim > MAX_RANK:
        return f"{name}: expected at most {MAX_RANK} axes, got {list(tensor.shape)}"
    return f"{name}: expected a contiguous tensor, got strides {tensor.stride()}"
