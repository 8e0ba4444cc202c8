"""The C library's interface as data: its constants, and the arguments of its kernels.

The ctypes structures of ``engine/capi`` and the C header ``plugins/capi/trt_eagle3_kernels.h`` are
generated from it. Importing it does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ABI_VERSION",
    "MAX_RANK",
    "AttentionPath",
    "ElementType",
    "Kernel",
    "KernelCall",
    "Mask",
    "Status",
]

ABI_VERSION = 10
MAX_RANK = 4

Result_co = TypeVar("Result_co", covariant=True)


class Status(IntEnum):
    """Return value of a call.

    INVALID_ARGUMENT: an invalid shape, dtype or alignment, or a null pointer. NOT_SUPPORTED: valid,
    but no kernel computes it on this device. WRONG_DEVICE: no CUDA device, or memory of another
    device than the current one. CUDA_ERROR: the launch failed.
    """

    OK = 0
    INVALID_ARGUMENT = 1
    NOT_SUPPORTED = 2
    WRONG_DEVICE = 3
    CUDA_ERROR = 4


class ElementType(IntEnum):
    """Element types of tensors, by torch's names."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    INT32 = 3
    BOOL = 4
    FLOAT8_E4M3FN = 5
    UINT8 = 6
    INT8 = 7


class Mask(IntEnum):
    """Mask of the tail: an explicit mask, or token i attends to slots up to its own."""

    TREE = 0
    CAUSAL = 1


class AttentionPath(IntEnum):
    """Implementation of attention. Values other than AUTO are for tests and measurements.

    PROMPT is only for ``TreeAttention``: the kernel for many new tokens, on Hopper.
    """

    AUTO = 0
    SIMPLE = 1
    MMA = 2
    WGMMA = 3
    PROMPT = 4


@dataclass(frozen=True, eq=False)
class Kernel:
    """A function of the C library, ``te3_<name>``, and its arguments ``te3_<name>_args``.

    Attributes:
        params: the C++ struct of the launch parameters: a pointer for each tensor, ``sizes``, and
            the scalars (``plugins/kernels/kernel_params.h``).
        doc: description for the headers.
        tensors: name -> type and shape, in the order of the struct.
        writes: the tensors that it writes.
        scalars: name -> ``int`` (int32), ``float`` or an enum, and a comment. They come after the
            tensors.
        sizes: the fields of ``params`` with sizes of the tensors, as declarations in C++.
        workspace: the header's description of the device memory needed besides its tensors; "" if
            none.
    """

    name: str
    params: str
    doc: str
    tensors: Mapping[str, str]
    writes: tuple[str, ...]
    scalars: Mapping[str, tuple[type[int] | type[float], str]]
    sizes: str
    workspace: str = ""


@dataclass(frozen=True)
class KernelCall(Generic[Result_co]):
    """One call of a kernel, as data. ``engine.capi.launch`` executes it.

    Attributes:
        tensors: by the kernel's names, all on one CUDA device; None is a null pointer. A tensor on
            the meta device has a shape and a null pointer.
        scalars: by the kernel's names; 0 if absent.
        result: the caller's result: tensors that the kernel writes.
        workspace: uint8; allocated if the kernel needs one and none is given.
    """

    kernel: Kernel
    tensors: Mapping[str, Tensor | None]
    scalars: Mapping[str, float]
    result: Result_co
    workspace: Tensor | None = None
