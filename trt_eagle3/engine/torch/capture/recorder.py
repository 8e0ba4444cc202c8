"""Capture launches into CUDA graphs: a whole forward, or one piece after the other."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

import torch

__all__ = ["PieceRecorder", "Record", "Recorder", "capturing", "record_pieces"]

T = TypeVar("T")
Record = Callable[[Callable[[], Any]], tuple[Any, Any]]
"""Runs a piece of work; returns its graph and the work's result (``Recorder.record``)."""

_CAPTURE_ERRORS = "thread_local"
"""A capture forbids CUDA calls of its own thread only: other threads allocate page-locked memory
for the next prompts' images meanwhile.
"""

_capturing = threading.Lock()


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture the block's launches into ``graph``, with memory from ``pool``.

    Captures are exclusive, and run without garbage collection: freeing another engine's graph would
    end the capture.
    """
    with _alone(), torch.cuda.graph(graph, pool=pool, capture_error_mode=_CAPTURE_ERRORS):
        yield


@contextmanager
def _alone() -> Iterator[None]:
    with _capturing:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


class Recorder(Protocol):
    """Captures pieces of work (``PieceRecorder``)."""

    def recording(self) -> AbstractContextManager[None]:
        """Allow calls of ``record`` within the block."""
        ...

    def record(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        """Run ``work``. Returns a graph, whose ``replay`` repeats it over the same memory, and the
        result of ``work``.
        """
        ...


class PieceRecorder:
    """Captures one piece of work after the other. All graphs share their memory, so they must be
    replayed in the order of capture.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Allow calls of ``record`` within the block."""
        # the first use in each thread creates a handle, which is forbidden while capturing
        torch.cuda.current_blas_handle()
        torch.cuda.synchronize()
        with _alone(), torch.cuda.stream(self._stream):
            torch.cuda.current_blas_handle()
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Return the graph of the launches of ``work``, and its result."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode=_CAPTURE_ERRORS)
        try:
            found = work()
        finally:
            graph.capture_end()
        return graph, found


def record_pieces(recorder: Recorder, work: Callable[[Record], T], *, ahead: bool) -> T:
    """Capture the pieces that ``work`` passes to its argument; return the result of ``work``.

    ``ahead``: no similar work has run yet, so run it once before capturing. That loads kernels and
    allocates memory, which is forbidden within a capture.
    """
    if ahead:
        work(_run)
    with recorder.recording():
        return work(recorder.record)


def _run(work: Callable[[], Any]) -> tuple[None, Any]:
    return None, work()
