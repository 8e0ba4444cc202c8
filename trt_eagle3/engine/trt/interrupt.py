"""Handle Ctrl-C while a library that loses exceptions calls back into Python."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["interrupt_noted"]


@contextmanager
def interrupt_noted() -> Iterator[Callable[[], bool]]:
    """Defer Ctrl-C to the end of the block; yield a function that returns whether it was pressed.

    Python delivers Ctrl-C to the main thread only. In other threads, nothing changes.
    """
    noted = threading.Event()
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, lambda *_: noted.set()) if is_main else None
    try:
        yield noted.is_set
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    if noted.is_set():
        raise KeyboardInterrupt
