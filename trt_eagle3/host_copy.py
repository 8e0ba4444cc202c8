"""Copies from the host that it does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["to_device"]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; one that lies on the host may be written again at once.

    From memory that is not page-locked, the host would wait for all that the device has yet to do.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    # torch gives page-locked memory to nobody else while a copy from it runs
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
