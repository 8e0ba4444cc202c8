"""How launches are captured into CUDA graphs: a whole forward, or one piece after the other."""

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
"""Runs a piece of work; returns its graph and what it returned (``Recorder.record``)."""

_CAPTURE_ERRORS = "thread_local"
"""Whose CUDA calls a capture forbids: other threads go on taking page-locked memory for the next
prompts' images.
"""

_capturing = threading.Lock()


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture what is launched within into ``graph``, whose memory comes from ``pool``.

    One at a time, and without a garbage collection: that of another engine's graph would end the
    capture.
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
        """Within it ``record`` may be called."""
        ...

    def record(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        """Run ``work``. Returns a graph, whose ``replay`` runs it again over the same memory, and
        what ``work`` returned.
        """
        ...


class PieceRecorder:
    """Captures one piece of work after the other, all of whose graphs share their memory: they must
    be replayed in the order in which they were captured.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within it ``record`` may be called."""
        # each thread's first use makes one, which may not be while capturing
        torch.cuda.current_blas_handle()
        torch.cuda.synchronize()
        with _alone(), torch.cuda.stream(self._stream):
            torch.cuda.current_blas_handle()
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """The graph of what ``work`` launches, and what it returns."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode=_CAPTURE_ERRORS)
        try:
            found = work()
        finally:
            graph.capture_end()
        return graph, found


def record_pieces(recorder: Recorder, work: Callable[[Record], T], *, ahead: bool) -> T:
    """Capture the pieces that ``work`` hands to the function that it is given; returns what
    ``work`` returns.

    ``ahead``: nothing like it has run yet, so run it once before. That loads kernels and takes
    memory, which may not happen within a capture.
    """
    if ahead:
        work(_run)
    with recorder.recording():
        return work(recorder.record)


def _run(work: Callable[[], Any]) -> tuple[None, Any]:
    return None, work()
