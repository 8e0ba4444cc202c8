"""Caller: the request that work belongs to, and whether it was cancelled."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from trt_eagle3.errors import RequestCancelledError

__all__ = ["NO_CALLER", "POLL_S", "Caller", "abandonable"]

POLL_S = 0.05
"""Seconds until a waiting thread notices that the request was cancelled."""

_T = TypeVar("_T")
_numbers = itertools.count()


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Caller:
    """One request.

    Attributes:
        client: its sender, if known. Decoders are shared among clients, then among requests.
        cancelled: whether the request's time is over or its client has left.
        number: of the request.
    """

    client: str = ""
    cancelled: Callable[[], bool] = _never
    number: int = field(default_factory=lambda: next(_numbers))

    def unless(self, over: Callable[[], bool]) -> Caller:
        """The same request, which also ends when ``over()``."""
        return replace(self, cancelled=lambda: over() or self.cancelled())

    def check(self) -> None:
        """Stop the work of a cancelled request.

        Raises:
            RequestCancelledError: the request was cancelled.
        """
        if self.cancelled():
            raise RequestCancelledError("cancelled while its images and videos were prepared.")


NO_CALLER = Caller()
"""A caller that never cancels."""


def abandonable(function: Callable[[], _T], caller: Caller, timeout_s: float) -> _T:
    """Call ``function`` on its own thread; abandon it on cancellation or after ``timeout_s``.

    Raises:
        RequestCancelledError: the request was cancelled.
        TimeoutError: ``timeout_s`` passed.
        Any error of ``function``.
    """
    found: list[_T] = []
    failed: list[BaseException] = []
    done = threading.Event()

    def call() -> None:
        try:
            found.append(function())
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    threading.Thread(target=call, name="trt-eagle3-fetch", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while not done.wait(POLL_S):
        caller.check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"not complete after {timeout_s:g} s")
    if failed:
        raise failed[0]
    return found[0]
