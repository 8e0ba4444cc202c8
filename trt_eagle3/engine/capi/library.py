"""Find and load the C library of our kernels."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_size_t, c_void_p
from functools import cache
from pathlib import Path

from trt_eagle3.engine.capi.kernels import KERNELS
from trt_eagle3.engine.capi.structs import argument_struct
from trt_eagle3.engine.kernels.libraries import INSTALL_KERNELS, find_library
from trt_eagle3.errors import EnvironmentMissingError
from trt_eagle3.graph.ops.kernel import ABI_VERSION

__all__ = ["LIBRARY_VARIABLE", "available", "library", "library_path"]

LIBRARY_VARIABLE = "TRT_EAGLE3_CAPI"
_LIBRARY_NAME = "libtrt_eagle3_capi.so"


def library_path() -> Path | None:
    """Return the library in TRT_EAGLE3_CAPI, else the one of ``find_library``."""
    if named := os.environ.get(LIBRARY_VARIABLE):
        return Path(named)
    return find_library(_LIBRARY_NAME)


def available() -> bool:
    """Return whether the library loads and torch sees a CUDA device."""
    import torch

    if library_path() is None or not torch.cuda.is_available():
        return False
    try:
        library()
    except EnvironmentMissingError:
        return False
    return True


@cache
def library() -> ctypes.PyDLL:
    """Load the library once, with its functions declared.

    Raises:
        EnvironmentMissingError: it is missing, does not load, or has another version.
    """
    found = _load()
    if (version := found.te3_abi_version()) != ABI_VERSION:
        raise EnvironmentMissingError(
            f"{library_path()}: has version {version} of the C interface, this package needs "
            f"{ABI_VERSION}. Run {INSTALL_KERNELS}."
        )
    found.te3_last_error.restype = c_char_p
    for kernel in KERNELS:
        args = POINTER(argument_struct(kernel))
        workspace = [c_void_p, c_size_t] if kernel.workspace else []
        getattr(found, f"te3_{kernel.name}").argtypes = [args, *workspace, c_void_p]
        if kernel.workspace:
            size_of = getattr(found, f"te3_{kernel.name}_workspace")
            size_of.argtypes = [args, POINTER(c_size_t)]
    return found


def _load() -> ctypes.PyDLL:
    path = library_path()
    if path is None:
        raise EnvironmentMissingError(
            f"{_LIBRARY_NAME}: not found. Build it: {INSTALL_KERNELS} (needs nvcc and cmake), or "
            f"set {LIBRARY_VARIABLE} to its path."
        )
    try:
        # PyDLL keeps the GIL. A launch takes microseconds; releasing the GIL in each of a prompt's
        # hundreds of launches would cost milliseconds whenever another thread needs it
        return ctypes.PyDLL(str(path))
    except OSError as error:
        raise EnvironmentMissingError(
            f"{path}: cannot be loaded: {error}. Rebuild it: {INSTALL_KERNELS}."
        ) from error
