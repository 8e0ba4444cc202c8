"""Let the file operations below a folder be counted, and let the nth of them fail or end the
process.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Literal

from trt_eagle3.atomic_io import directory

__all__ = ["CRASHED", "Action", "in_child", "watch"]

Action = Literal["crash", "full"]
CRASHED = 9
_CHANGES = {
    "os.mkdir",
    "os.link",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "fcntl.flock",
    "fsync",
    "exchange",
}
_TAKES_ROOM = {"open", "os.mkdir", "os.link", "fsync"}


def watch(root: Path, at: int, action: Action) -> Callable[[], int]:
    """From now on, for the life of this process, let operation ``at`` below ``root`` crash or find
    the disk full.

    Returns:
        How many operations there have been.
    """
    seen = 0

    def point(event: str, path: object) -> None:
        nonlocal seen
        if not str(path).startswith(str(root)) or (action == "full" and event not in _TAKES_ROOM):
            return
        seen += 1
        if seen == at and action == "crash":
            os._exit(CRASHED)
        if seen == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if (
            event == "open"
            and isinstance(args[2], int)
            and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        ):
            point(event, _path_of(args[0]))
        elif event in _CHANGES and not (event == "os.mkdir" and Path(args[0]).exists()):
            point(event, _path_of(args[1] if event == "os.link" else args[0]))

    _count_unaudited(point)
    sys.addaudithook(audit)
    return lambda: seen


def _count_unaudited(point: Callable[[str, object], None]) -> None:
    """``fsync``, and the exchange of folders, which is a call of the C library."""
    fsync, exchange = os.fsync, directory.exchange

    def counted_fsync(fd: int) -> None:
        point("fsync", _path_of(fd))
        fsync(fd)

    def counted_exchange(new: Path, path: Path) -> None:
        point("exchange", path)
        exchange(new, path)
        point("exchange", path)

    os.fsync = counted_fsync  # type: ignore[assignment]
    directory.exchange = counted_exchange


def _path_of(place: Any) -> str:
    """Of a path, or of an open file."""
    return (
        str(Path(f"/proc/self/fd/{place}").readlink())
        if isinstance(place, int)
        else os.fsdecode(place)
    )


def in_child(function: Callable[..., object], *args: object) -> int:
    """Run ``function`` in a process of its own; returns its exit code."""
    child = start(function, *args)
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def start(function: Callable[..., object], *args: object) -> Any:
    """Start ``function`` in a process of its own, which ends in five minutes at most."""
    # this process has threads, so it does not fork itself
    context = multiprocessing.get_context("forkserver")
    preload = [__name__, function.__module__]
    server = forkserver._forkserver
    # of another test module: larger to fork, or without what this one wants
    if server._preload_modules != preload:
        server._stop()
        context.set_forkserver_preload(preload)
    child = context.Process(target=_limited, args=(function, *args))
    child.start()
    return child


def _limited(function: Callable[..., object], *args: object) -> None:
    signal.alarm(300)
    function(*args)
