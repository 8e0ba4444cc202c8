"""Stopwatch: measures elapsed seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Stopwatch"]


class Stopwatch:
    """Measures seconds since its start. Lock-free, so any thread can read it, also in a hang."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a stopped stopwatch. ``clock``: returns monotonic seconds."""
        self._clock = clock
        self._begin: float | None = None

    def start(self) -> None:
        """Start at 0, also if it runs already."""
        self._begin = self._clock()

    def stop(self) -> None:
        """Stop, and reset to 0."""
        self._begin = None

    @property
    def runs(self) -> bool:
        """Whether it runs."""
        return self._begin is not None

    @property
    def seconds(self) -> float:
        """Seconds since its start; 0 while it is stopped."""
        begin = self._begin  # read once: another thread may stop it meanwhile
        return 0.0 if begin is None else self._clock() - begin
