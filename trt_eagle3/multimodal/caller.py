"""Caller: the request that a piece of work belongs to, with its cancellation."""

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
"""Seconds between two checks of a waiting thread for cancellation."""

_T = TypeVar("_T")
_numbers = itertools.count()


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Caller:
    """The request that a piece of work belongs to.

    Attributes:
        client: name of the client, if known. Decoders are shared among clients first, then among
            the requests of a client.
        cancelled: returns True once the request has timed out or its client has disconnected.
        number: unique number of the request.
    """

    client: str = ""
    cancelled: Callable[[], bool] = _never
    number: int = field(default_factory=lambda: next(_numbers))

    def unless(self, over: Callable[[], bool]) -> Caller:
        """Return the same request, which is also cancelled once ``over()`` is true."""
        return replace(self, cancelled=lambda: over() or self.cancelled())

    def check(self) -> None:
        """Raise if the request is cancelled.

        Raises:
            RequestCancelledError: the request was cancelled.
        """
        if self.cancelled():
            raise RequestCancelledError("cancelled while its images and videos were prepared.")


NO_CALLER = Caller()
"""A caller that is never cancelled."""


def abandonable(function: Callable[[], _T], caller: Caller, timeout_s: float) -> _T:
    """Call ``function`` on its own thread. Abandon it on cancellation or after ``timeout_s``.

    Raises:
        RequestCancelledError: the request was cancelled.
        TimeoutError: ``timeout_s`` passed.
        Exception: any error of ``function``.
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
