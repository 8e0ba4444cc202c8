"""Waiting for states, however fast or slow a machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_for"]


def wait_for(holds: Callable[[], object], seconds: float = 60) -> None:
    """Until ``holds``.

    Raises:
        AssertionError: it did not within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)
