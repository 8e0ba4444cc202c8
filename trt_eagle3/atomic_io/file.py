"""Write single files.

No function here opens for writing a name that exists already: it may be a hard link.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from trt_eagle3.io.bounded_read import open_regular

__all__ = [
    "PARTIAL",
    "atomic_file",
    "create_file",
    "make_parents",
    "partial_name",
    "place_file",
    "sync",
    "sync_tree",
    "write_file",
]

PARTIAL = ".partial-"
"""Mark of an unfinished file or folder: ``<name>.partial-<16 hex digits>``."""
_FICLONE = 0x40049409  # linux/fs.h: share the extents of another file, copy on write
_CHUNK_BYTES = 1 << 24


def partial_name(path: Path) -> Path:
    """Return a random name beside ``path`` for its unfinished content.

    Random, and not made of the process id: two containers on one volume have the same ids.
    """
    return path.with_name(f"{path.name}{PARTIAL}{secrets.token_hex(8)}")


def create_file(path: Path, data: bytes | memoryview, mode: int = 0o666) -> None:
    """Create ``path``, and the folders above it, with ``data``; ``atomic_directory`` makes it
    durable.

    Raises:
        FileExistsError: something is there already; it is left as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _create(path, mode) as stream:
        stream.write(data)


def write_file(path: Path, data: bytes | memoryview, mode: int = 0o666) -> None:
    """Put ``data`` at ``path``, whole or not at all, and durably.

    A file that was there is replaced, not changed: its other hard links keep their content.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    with atomic_file(path, mode) as stream:
        stream.write(data)


@contextlib.contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Open a stream whose content becomes the file ``path`` when the block ends without an error.

    The content is synced before the rename and the folder after it.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    make_parents(path)
    partial = partial_name(path)
    try:
        with _create(partial, mode) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
        sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def place_file(source: Path, destination: Path, *, link: bool = True) -> str:
    """Create ``destination`` with the content of ``source`` by reflink, hard link or copy, in that
    order.

    Args:
        link: whether a hard link will do; without, later changes of ``source`` in place never show.
    Returns:
        Which it was: ``reflink``, ``hard link`` or ``copy``.
    Raises:
        OSError: it cannot be written, or something is there already (``FileExistsError``), which
            stays as it is.
        UserError: ``source`` is not a regular file.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    # a Hub cache holds links, and a hard link to a link would leave the bundle
    source = source.resolve()
    if _reflink(source, destination):
        return "reflink"
    if link and _hard_link(source, destination):
        return "hard link"
    _copy(source, destination)
    return "copy"


def _create(path: Path, mode: int = 0o666) -> IO[bytes]:
    """Open a new file for writing; O_EXCL follows no link and opens nothing that exists."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb")


def _reflink(source: Path, destination: Path) -> bool:
    with open_regular(source) as origin, _removed_on_error(destination) as copy:
        try:
            fcntl.ioctl(copy.fileno(), _FICLONE, origin.fileno())
        except OSError:
            destination.unlink()
            return False
        return True


def _hard_link(source: Path, destination: Path) -> bool:
    try:
        os.link(source, destination)
    except FileExistsError:
        raise
    except OSError:
        # another file system, none that has links, too many of them, a file of somebody else
        return False
    return True


def _copy(source: Path, destination: Path) -> None:
    with open_regular(source) as origin, _removed_on_error(destination) as copy:
        shutil.copyfileobj(origin, copy, _CHUNK_BYTES)


@contextlib.contextmanager
def _removed_on_error(path: Path) -> Iterator[IO[bytes]]:
    """Create ``path``; remove that new file again where the block fails."""
    with _create(path) as stream:
        try:
            yield stream
            stream.flush()
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def make_parents(path: Path) -> None:
    """Make the folders above ``path`` and sync the entries of those that are new."""
    missing = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def sync_tree(folder: Path) -> None:
    """Sync every file and every folder below ``folder``, and ``folder`` itself, the deepest
    first.
    """
    for place, _, files in os.walk(folder, topdown=False):
        for name in files:
            file = Path(place, name)
            if not file.is_symlink():
                sync(file)
        sync(Path(place))


def sync(path: Path) -> None:
    """Sync a file or a folder to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
