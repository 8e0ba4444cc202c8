"""The host's time in the parts of a decoding step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

from trt_eagle3.decode.forward.device_batch import DeviceBatch
from trt_eagle3.decode.forward.runner import DraftRunner, TargetRunner
from trt_eagle3.decode.memory.state import LayerStates
from trt_eagle3.decode.speculation.eagle import EagleDrafter
from trt_eagle3.decode.speculation.grow import TreeGrower
from trt_eagle3.decode.step import stepper
from trt_eagle3.decode.step.stepper import Stepper
from trt_eagle3.engine.torch.capture.whole import Captured
from trt_eagle3.host_copy import Readback

__all__ = ["HostTime"]

_PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "batch": ((DeviceBatch, "of"),),
    "propose": ((TreeGrower, "grow"),),
    "target inputs": ((Stepper, "_rows"),),
    "forward": (
        (TargetRunner, "forward"),
        (TargetRunner, "forward_mixed"),
        (DraftRunner, "forward"),
        (DraftRunner, "fuse"),
    ),
    "fill": ((Captured, "fill"),),
    "replay": ((torch.cuda.CUDAGraph, "replay"),),
    "accept": ((stepper, "verify"),),
    "commit": ((LayerStates, "commit"),),
    "extend": ((EagleDrafter, "extend"),),
    "wait": ((Readback, "wait"),),
    "step": ((Stepper, "step"),),
}


class HostTime:
    """Measures the seconds in each part while it is entered, without those of parts it calls."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        self._inner: list[float] = []
        self._stack = ExitStack()

    def __enter__(self) -> HostTime:
        for part, functions in _PARTS.items():
            for holder, name in functions:
                timed = self._timed(part, getattr(holder, name))
                self._stack.enter_context(patch.object(holder, name, timed))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                taken = time.perf_counter() - start
                self.seconds[part] += taken - self._inner.pop()
                if self._inner:
                    self._inner[-1] += taken

        return call
