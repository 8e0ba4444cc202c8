"""Putting a bundle on disk: weight files without copying where that can be, and all of it or nothing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from trt_eagle3.engine.bundle import PARTIAL
from trt_eagle3.errors import UserError

__all__ = ["atomic_directory", "place_file", "replace_file", "write_file"]

_FICLONE = 0x40049409  # linux/fs.h: share the extents of another file, copy on write


def place_file(source: Path, destination: Path) -> str:
    """Put ``source`` at ``destination`` by reflink, hard link or copy, in that order; says which it was."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    source = source.resolve()  # a Hub cache holds links, and a hard link to a link would leave the bundle
    with contextlib.suppress(OSError), source.open("rb") as src, destination.open("wb") as dst:
        fcntl.ioctl(dst.fileno(), _FICLONE, src.fileno())
        return "reflink"
    destination.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        destination.hardlink_to(source)
        return "hard link"
    shutil.copyfile(source, destination)
    _sync(destination)
    return "copy"


def write_file(path: Path, data: bytes | memoryview) -> None:
    """Write and sync a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    _sync(path)


def replace_file(path: Path, text: str) -> None:
    """Put ``text`` (UTF-8) at ``path``, whole or not at all; who has linked the file that was there keeps that one.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    partial = path.with_name(f"{path.name}{PARTIAL}{os.getpid()}")
    try:
        write_file(partial, text.encode())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A folder to build in that becomes ``path`` when the block ends well, and vanishes when it does not.

    Raises:
        UserError: the disk is full, or ``path`` cannot be written.
    """
    partial = path.with_name(f"{path.name}{PARTIAL}{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        partial.mkdir()
        yield partial
        _sync(partial)
        _replace(partial, path)
    except OSError as error:
        reason = "the disk is full" if error.errno in {errno.ENOSPC, errno.EDQUOT} else (error.strerror or str(error))
        raise UserError(f"{path}: cannot write the bundle: {reason}. Nothing was left behind.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sweep(path: Path) -> None:
    """Remove what builds of ``path`` that were killed have left; put back the bundle that one had just moved aside."""
    for old in path.parent.glob(f"{path.name}{PARTIAL}old-*"):
        if not path.exists():
            old.rename(path)
    for left in path.parent.glob(f"{path.name}{PARTIAL}*"):
        pid = left.name.rpartition("-")[2]
        if not (pid.isdigit() and Path(f"/proc/{pid}").exists()) or pid == str(os.getpid()):
            shutil.rmtree(left, ignore_errors=True)


def _replace(partial: Path, path: Path) -> None:
    old = path.with_name(f"{path.name}{PARTIAL}old-{os.getpid()}")
    if path.exists():
        path.rename(old)
    try:
        partial.rename(path)
    except BaseException:  # Ctrl-C too
        if old.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
    _sync(path.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
