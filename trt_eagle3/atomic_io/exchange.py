"""Exchange two folders: ``renameat2(RENAME_EXCHANGE)``, which Python has no function for."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

__all__ = ["ASIDE", "exchange"]

ASIDE = "-old"
"""Suffix under which the fallback keeps the replaced folder for a moment."""
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}


def exchange(new: Path, path: Path) -> None:
    """Let ``new`` and ``path``, which both exist and share a folder, change names.

    Atomic on Linux 3.15 or later with ext4, XFS, Btrfs, tmpfs or overlayfs: whoever opens ``path``
    finds the one or the other. Where kernel or file system lack it (NFS, some FUSE), two renames do
    it, and for microseconds between them ``path`` does not exist: a reader can find nothing there,
    never a mixture. A process killed then leaves the old folder as ``new`` + ``ASIDE``, which the
    next writer puts back.

    Raises:
        OSError: it cannot be done; both are where they were.
    """
    if not _exchange_atomically(new, path):
        _exchange_by_renames(new, path)


def _exchange_atomically(new: Path, path: Path) -> bool:
    rename = _renameat2()
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(path), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(path))


def _exchange_by_renames(new: Path, path: Path) -> None:
    aside = new.with_name(new.name + ASIDE)
    path.rename(aside)
    try:
        new.rename(path)
    except BaseException:  # Ctrl-C too
        aside.rename(path)
        raise
    aside.rename(new)


@cache
def _renameat2() -> Callable[..., int] | None:
    """Return the C library's function, or None where it has none (musl, glibc before 2.28)."""
    try:
        function: Callable[..., int] = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return None
    return function
