"""Asynchronous copies between host and device."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Readback", "copy_on_side_stream", "host_buffer", "to_device"]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy ``tensor`` to ``device``; a host tensor may be overwritten at once.

    The copy goes through page-locked memory. Otherwise the host would wait for all queued work of
    the device.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    # torch does not reuse page-locked memory while a copy from it runs
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate uninitialised host memory for copies to ``device``; page-locked for CUDA."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def copy_on_side_stream(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host ``tensor`` to ``device`` in parallel with the work queued there."""
    if device.type != "cuda":
        return tensor.to(device)
    copies, here = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        found = to_device(tensor, device)
    here.wait_stream(copies)
    found.record_stream(here)  # its memory belongs to the side stream
    return found


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Readback:
    """An asynchronous copy of a tensor to the host."""

    def __init__(self, tensor: Tensor) -> None:
        """Start the copy on the device's current stream."""
        self._host = tensor
        self._done: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> list[Any]:
        """Wait for the copy, but not for later launches; returns the numbers."""
        if self._done is not None:
            self._done.synchronize()
        found: list[Any] = self._host.tolist()
        return found
