"""Copies between host and device that neither of the two waits for."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Readback", "copy_on_side_stream", "host_buffer", "to_device"]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; one that lies on the host may be written again at once.

    From memory that is not page-locked, the host would wait for all that the device has yet to do.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    # torch gives page-locked memory to nobody else while a copy from it runs
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory on the host, with anything in it, that ``device`` will be sent: page-locked for
    CUDA.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def copy_on_side_stream(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` of the host on ``device``, copied while that still works on what it was given
    before.
    """
    if device.type != "cuda":
        return tensor.to(device)
    copies, here = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        found = to_device(tensor, device)
    here.wait_stream(copies)
    found.record_stream(here)  # its memory is the other stream's
    return found


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Readback:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        """Begin the copy, in the order of the device's current stream."""
        self._host = tensor
        self._done: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> list[Any]:
        """The numbers; the host waits for the copy, and for nothing that was launched after it."""
        if self._done is not None:
            self._done.synchronize()
        found: list[Any] = self._host.tolist()
        return found
