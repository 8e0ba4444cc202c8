"""Exchange two folders by ``renameat2(RENAME_EXCHANGE)``, which Python has no function for."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

__all__ = ["ASIDE", "exchange"]

ASIDE = "-old"
"""Suffix under which the fallback briefly keeps the replaced folder."""
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}


def exchange(new: Path, path: Path) -> None:
    """Exchange the names of ``new`` and ``path``, which both exist in one folder.

    Atomic on Linux 3.15 or later with ext4, XFS, Btrfs, tmpfs or overlayfs: a reader of ``path``
    finds either folder. If kernel or file system lack it (NFS, some FUSE), two renames are used.
    ``path`` is missing for microseconds between them. A reader may then find no folder, but never a
    mixture. If the process is killed there, the old folder stays as ``new`` + ``ASIDE``. The next
    writer moves it back.

    Raises:
        OSError: the exchange failed; both are at their old places.
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
    except BaseException:  # including Ctrl-C
        aside.rename(path)
        raise
    aside.rename(new)


@cache
def _renameat2() -> Callable[..., int] | None:
    """Return the C library's function, or None if it has none (musl, glibc before 2.28)."""
    try:
        function: Callable[..., int] = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return None
    return function
