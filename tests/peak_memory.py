"""What a call adds to this process's memory at its peak."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

__all__ = ["peak_bytes"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(run: Callable[[], object]) -> int:
    """By how many bytes the resident set grows during ``run``, at most.

    Free memory of the allocator is given back first: what ``run`` takes of that would not count.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _CLEAR.write_text("5")  # the peak so far is forgotten
    before = _peak()
    run()
    return _peak() - before


def _peak() -> int:
    (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    return int(kib) * 1024
