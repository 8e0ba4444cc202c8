"""Host memory that a build takes, reported before the build begins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

__all__ = ["free_host_bytes", "tell_need"]

_log = logging.getLogger("trt_eagle3")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_MIN_REPORTED = 1 << 30


def tell_need(graph: str, need: int | None, show: Callable[[str], object]) -> None:
    """Report to ``show`` that building ``graph`` takes ``need`` bytes; warn if they are not free.

    ``need`` is an estimate, so it never stops a build. None: no estimate.
    """
    if need is None or need < _MIN_REPORTED:
        return
    show(f"{graph}: takes up to {need / 1e9:.1f} GB of memory")
    free = free_host_bytes()
    if free is not None and need > free:
        _log.warning(
            "%s: its build takes up to %.1f GB of memory, %.1f GB are free: it may be killed",
            graph,
            need / 1e9,
            free / 1e9,
        )


def free_host_bytes() -> int | None:
    """Return the bytes that this process may still allocate, by the kernel and its control group;
    None if neither is known.
    """
    known = [found for found in (_available(), _left_in_group()) if found is not None]
    return min(known, default=None)


def _available() -> int | None:
    try:
        lines = _MEMINFO.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return None
    found = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return int(found[1]) << 10 if found else None


def _left_in_group() -> int | None:
    try:
        limit, used = (
            (_CGROUP / name).read_text(encoding="utf-8").strip()
            for name in ("memory.max", "memory.current")
        )
    except OSError:  # no control group, or version 1
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))
