"""Read untrusted files: only regular files up to a size, without blocking."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from trt_eagle3.errors import UserError

__all__ = ["open_regular", "read_bounded", "read_text_bounded"]

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(file: Path) -> BinaryIO:
    """Open ``file`` for reading bytes; close it, or use it as a context manager.

    A FIFO, socket, device or folder is rejected at once. Opening never blocks on a writer.

    Raises:
        UserError: this is not a regular file.
        OSError: the file is missing or unreadable.
    """
    # checked before opening, because opening a device may have effects
    _check_regular(file, file.stat().st_mode)
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(file, os.fstat(descriptor).st_mode)  # it may have been replaced since
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bounded(file: Path, most_bytes: int) -> bytes:
    """Read the whole of a regular file.

    Raises:
        UserError: this is not a regular file, or it has more than ``most_bytes``.
        OSError: the file is missing or unreadable.
    """
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        # read() allocates the requested size. Some files grow, and those of /proc have size 0.
        data = stream.read(min(size, most_bytes) + 1)
        while len(data) <= most_bytes and (more := stream.read(1 << 16)):
            data += more
        if len(data) > most_bytes:
            size = max(os.fstat(stream.fileno()).st_size, len(data))
            raise UserError(
                f"{file}: {size} bytes long, expected at most {most_bytes}. Is it the right file?"
            )
    return data


def read_text_bounded(file: Path, most_bytes: int) -> str:
    """Read the whole of a regular file as UTF-8.

    Raises:
        UserError: as for ``read_bounded``, or the file is not UTF-8.
        OSError: the file is missing or unreadable.
    """
    try:
        return read_bounded(file, most_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 at byte {error.start}. Save it as UTF-8.") from error


def _check_regular(file: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise UserError(f"{file}: expected a regular file, got {kind}. Name the file itself.")
