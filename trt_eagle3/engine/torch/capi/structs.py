"""The C library's structs in ctypes, made from the descriptions of its kernels."""

from __future__ import annotations

from collections.abc import Mapping
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
    """``te3_<name>_args``: the tensors, then the scalars."""
    fields: list[tuple[str, Any]] = [(name, TensorStruct) for name in kernel.tensors]
    for name, (kind, _) in kernel.scalars.items():
        fields.append((name, c_float if kind is float else c_int32))
    return type(f"te3_{kernel.name}_args", (Structure,), {"_fields_": tuple(fields)})


def arguments_of(call: KernelCall[Any]) -> Structure:
    """The arguments of ``call``; what it does not name stays null or 0.

    Raises:
        ValueError: a tensor is not contiguous, has too many axes, or a dtype that no kernel takes.
    """
    kernel, values = call.kernel, list[float]()
    for name in kernel.tensors:
        tensor = call.tensors.get(name)
        values += _NULL if tensor is None else _described(name, tensor)
    values += [call.scalars.get(name, 0) for name in kernel.scalars]
    # in one go: a step of many launches waits for the host
    return argument_struct(kernel).from_buffer_copy(_packing(kernel).pack(*values))


_NULL = (0,) * (3 + MAX_RANK)


@cache
def _packing(kernel: Kernel) -> Struct:
    """The layout of ``argument_struct``, its end aligned as its tensors are."""
    scalars = ("f" if kind is float else "i" for kind, _ in kernel.scalars.values())
    return Struct("@" + f"Pii{MAX_RANK}q" * len(kernel.tensors) + "".join(scalars) + "0q")


@cache
def _dtypes() -> Mapping[torch.dtype, int]:
    import torch

    return {getattr(torch, dtype.name.lower()): int(dtype) for dtype in ElementType}


def _described(name: str, tensor: Tensor) -> tuple[int, ...]:
    """The fields of a ``TensorStruct``."""
    dtype, shape = _dtypes().get(tensor.dtype), tensor.shape
    if dtype is None:
        known = ", ".join(map(str, _dtypes()))
        raise ValueError(f"{name}: expected one of {known}, got {tensor.dtype}")
    if len(shape) > MAX_RANK:
        raise ValueError(f"{name}: expected at most {MAX_RANK} axes, got {list(shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
    rank = len(shape)
    return (tensor.data_ptr(), dtype, rank, *shape, *_NULL[: MAX_RANK - rank])
