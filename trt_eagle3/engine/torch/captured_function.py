"""Functions of tensors that call sessions, captured as one CUDA graph each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from trt_eagle3.engine.torch.cuda_graph import Captured, CapturedGraphs, capturing, shapes_of

__all__ = ["CapturedFunctions", "constant_on", "launching_singly", "single_launches"]

Function = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]

_mode = threading.local()
_constants: dict[tuple[object, ...], Tensor] = {}


@contextmanager
def single_launches() -> Iterator[None]:
    """Let sessions of this thread launch their kernels one by one, which a capture can take: a
    graph of their own it cannot.
    """
    _mode.single = True
    try:
        yield
    finally:
        _mode.single = False


def launching_singly() -> bool:
    """Whether this thread is within ``single_launches``."""
    return getattr(_mode, "single", False)


def constant_on(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` of the host, which is the same in every run of what is captured, on ``device``: a
    capture can copy nothing from the host.
    """
    key = (tensor.dtype, tuple(tensor.shape), tensor.contiguous().numpy().tobytes(), device)
    if key not in _constants:
        _constants[key] = tensor.to(device)
    return _constants[key]


class CapturedFunctions:
    """Functions that are captured when their shapes come again (``CapturedGraphs``).

    A function neither waits for the device nor copies from the host, and its inputs lie on the
    device; when it is captured it runs twice over them. Its outputs are overwritten by its next run
    of the same shapes.
    """

    def __init__(self) -> None:
        self._graphs = CapturedGraphs()
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def run(self, name: str, function: Function, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``function(inputs)``; ``name`` tells functions apart."""
        shapes = (*shapes_of(inputs), (name, ()))
        captured = self._graphs.get(shapes)
        if captured is None:
            if not self._graphs.due(shapes):
                return function(inputs)
            captured = self._graphs.add(shapes, self._capture(function, inputs))
        return captured.run(inputs)

    def _capture(self, function: Function, inputs: Mapping[str, Tensor]) -> Captured:
        static = {name: self._static(name, tensor) for name, tensor in inputs.items()}
        torch.cuda.current_blas_handle()  # as for sessions: not while capturing
        with single_launches():
            function(static)  # what it takes from the host is on the device from now on
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, self._graphs.pool):
                outputs = function(static)
        return Captured(graph, static, outputs)

    def _static(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` in memory that all graphs share: one runs at a time, and each run
        begins by filling it.
        """
        key = name, tensor.dtype
        if key not in self._buffers or len(self._buffers[key]) < tensor.numel():
            self._buffers[key] = tensor.new_empty(tensor.numel())
        return self._buffers[key][: tensor.numel()].view(tensor.shape).copy_(tensor)
