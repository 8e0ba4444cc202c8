"""Calls of the C library's checks with tensors that are nowhere; no GPU needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trt_eagle3.engine.capi.kernels import KERNELS
from trt_eagle3.engine.capi.structs import TensorStruct, argument_struct

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
ADDRESS = 1 << 20  # aligned, and never read: every call fails before it
INVALID, WRONG_DEVICE = 1, 3
F32, F16, BF16, I32, BOOL, FP8, U8, I8 = range(8)


def tensor(dtype: int, *shape: int, data: int | None = ADDRESS) -> Any:
    return TensorStruct(data, dtype, len(shape), shape)


def args_of(name: str) -> Any:
    return argument_struct(next(kernel for kernel in KERNELS if kernel.name == name))


def status_of(library: ctypes.CDLL, function: Callable[..., int], *args: Any) -> tuple[int, str]:
    return function(*args), library.te3_last_error().decode()
