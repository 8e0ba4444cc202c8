"""Launch a ``KernelCall`` on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, byref, c_size_t
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from trt_eagle3.engine.capi.library import library
from trt_eagle3.engine.capi.structs import arguments_of
from trt_eagle3.graph.ops.kernel import Kernel, KernelCall, Status

if TYPE_CHECKING:
    import torch

__all__ = ["launch", "launched"]

P = ParamSpec("P")
R = TypeVar("R")

_ERRORS: dict[int, type[Exception]] = {
    Status.INVALID_ARGUMENT: ValueError,
    Status.NOT_SUPPORTED: NotImplementedError,
    Status.WRONG_DEVICE: ValueError,
}


def launched(call: Callable[P, KernelCall[R]]) -> Callable[P, R]:
    """Return a function that launches the calls of ``call``, and returns their results."""

    @wraps(call)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        return launch(call(*args, **kwargs))

    return function


def launch(call: KernelCall[R]) -> R:
    """Enqueue ``call`` on the current stream of its tensors' device; return its result.

    Raises:
        ValueError: a tensor does not fit; the message names it.
        NotImplementedError: no kernel computes this on this device.
    """
    import torch

    args, device = arguments_of(call), _device(call)
    if device.index == torch.cuda.current_device():  # querying is faster than setting it
        _launch(call, args, device)
    else:
        with torch.cuda.device(device):
            _launch(call, args, device)
    return call.result


def _launch(call: KernelCall[Any], args: Structure, device: torch.device) -> None:
    if call.kernel.workspace:
        _launch_with_workspace(call, args, device)
    else:
        _check(_function(call.kernel)(byref(args), _stream(device)))


@cache
def _function(kernel: Kernel) -> Callable[..., int]:
    function: Callable[..., int] = getattr(library(), f"te3_{kernel.name}")
    return function


def _launch_with_workspace(call: KernelCall[Any], args: Structure, device: torch.device) -> None:
    """Launch with the call's workspace, or with a new one of the size that the kernel needs."""
    import torch

    wanted, workspace = c_size_t(), call.workspace
    size_of = getattr(library(), f"te3_{call.kernel.name}_workspace")
    _check(size_of(byref(args), byref(wanted)))
    if wanted.value and workspace is None:
        workspace = torch.empty(wanted.value, dtype=torch.uint8, device=device)
    pointer, size = (None, 0) if workspace is None else (workspace.data_ptr(), workspace.nbytes)
    _check(_function(call.kernel)(byref(args), pointer, size, _stream(device)))


def _device(call: KernelCall[Any]) -> torch.device:
    device = next(t.device for t in call.tensors.values() if t is not None)
    if device.type != "cuda":
        raise ValueError(f"expected tensors on a CUDA device, got one on {device}")
    return device


def _stream(device: torch.device) -> int:
    """Return the handle of ``torch.cuda.current_stream``, without creating a stream object."""
    import torch

    return torch._C._cuda_getCurrentRawStream(device.index)


def _check(status: int) -> None:
    if status != Status.OK:
        message = library().te3_last_error().decode()
        raise _ERRORS.get(status, RuntimeError)(message)
