"""Caller: for whom an image or video is prepared, and whether anybody still waits for it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from trt_eagle3.errors import RequestCancelledError

__all__ = ["NOBODY", "POLL_S", "Caller", "abandonable"]

POLL_S = 0.05
"""How soon whoever waits notices that the request was cancelled."""

_T = TypeVar("_T")
_numbers = itertools.count()


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Caller:
    """One request.

    Attributes:
        client: who sent it, as far as is known; decoders are shared among clients, then among
            requests.
        cancelled: whether nobody waits any more: the request's time is over, or its client has
            left.
        number: of the request.
    """

    client: str = ""
    cancelled: Callable[[], bool] = _never
    number: int = field(default_factory=lambda: next(_numbers))

    def unless(self, over: Callable[[], bool]) -> Caller:
        """The same request, which also ends when ``over()``."""
        return replace(self, cancelled=lambda: over() or self.cancelled())

    def check(self) -> None:
        """Go no further for nobody.

        Raises:
            RequestCancelledError: the request was cancelled.
        """
        if self.cancelled():
            raise RequestCancelledError("cancelled while its images and videos were prepared.")


NOBODY = Caller()
"""For whom nothing is cancelled."""


def abandonable(function: Callable[[], _T], caller: Caller, timeout_s: float) -> _T:
    """Call ``function`` on a thread of its own, which is left behind when the request is cancelled
    or after ``timeout_s``.

    Raises:
        RequestCancelledError: the request was cancelled. TimeoutError: it took longer. What
            ``function`` raises, besides.
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
