"""Stopwatch: how long something has been going on."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Stopwatch"]


class Stopwatch:
    """Any thread may read it, and no lock is taken: so also while the one that started it hangs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Stopped. ``clock``: seconds since any moment."""
        self._clock = clock
        self._begin: float | None = None

    def start(self) -> None:
        """Begin at 0, whether it runs or not."""
        self._begin = self._clock()

    def stop(self) -> None:
        """Go back to 0, and stay there."""
        self._begin = None

    @property
    def runs(self) -> bool:
        """Whether it was started, and not stopped since."""
        return self._begin is not None

    @property
    def seconds(self) -> float:
        """Since it was started; 0 while it is stopped."""
        begin = self._begin  # read once: another thread may stop it meanwhile
        return 0.0 if begin is None else self._clock() - begin
