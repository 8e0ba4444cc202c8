"""Write single files atomically.

No function here opens an existing name for writing, because it may be a hard link.
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

    It is random instead of the process id, which two containers on one volume may share.
    """
    return path.with_name(f"{path.name}{PARTIAL}{secrets.token_hex(8)}")


def create_file(path: Path, data: bytes | memoryview, mode: int = 0o666) -> None:
    """Create ``path`` and its parent folders with ``data``, without syncing.

    ``atomic_directory`` makes the file durable.

    Raises:
        FileExistsError: ``path`` exists; it is left unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _create(path, mode) as stream:
        stream.write(data)


def write_file(path: Path, data: bytes | memoryview, mode: int = 0o666) -> None:
    """Write ``data`` to ``path``, atomically and durably.

    An existing file is replaced, not changed: its other hard links keep their content.

    Raises:
        OSError: the file cannot be written; no partial file is left.
    """
    with atomic_file(path, mode) as stream:
        stream.write(data)


@contextlib.contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Open a stream whose content becomes the file ``path`` when the block ends without an error.

    The content is synced before the rename and the folder after it.

    Raises:
        OSError: the file cannot be written; no partial file is left.
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
    """Create ``destination`` with the content of ``source``: by reflink, hard link or copy.

    Args:
        link: whether a hard link is allowed. Without it, later changes of ``source`` in place do
            not affect ``destination``.
    Returns:
        The method used: ``reflink``, ``hard link`` or ``copy``.
    Raises:
        OSError: ``destination`` cannot be written, or exists (``FileExistsError``) and is left
            unchanged.
        UserError: ``source`` is not a regular file.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    # a Hub cache holds links, and a hard link to a link would point outside the bundle
    source = source.resolve()
    if _reflink(source, destination):
        return "reflink"
    if link and _hard_link(source, destination):
        return "hard link"
    _copy(source, destination)
    return "copy"


def _create(path: Path, mode: int = 0o666) -> IO[bytes]:
    """Open a new file for writing. O_EXCL does not follow links or open existing files."""
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
        # another file system, one without links, too many links, or a file of another user
        return False
    return True


def _copy(source: Path, destination: Path) -> None:
    with open_regular(source) as origin, _removed_on_error(destination) as copy:
        shutil.copyfileobj(origin, copy, _CHUNK_BYTES)


@contextlib.contextmanager
def _removed_on_error(path: Path) -> Iterator[IO[bytes]]:
    """Create ``path``, and remove it if the block fails."""
    with _create(path) as stream:
        try:
            yield stream
            stream.flush()
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def make_parents(path: Path) -> None:
    """Create the folders above ``path`` and sync the entries of new ones."""
    missing = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def sync_tree(folder: Path) -> None:
    """Sync every file and folder below ``folder``, then ``folder`` itself, the deepest first."""
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
