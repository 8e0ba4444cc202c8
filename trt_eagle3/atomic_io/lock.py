"""Lock an output against other writers, and find what a killed writer has left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from trt_eagle3.atomic_io.exchange import ASIDE
from trt_eagle3.atomic_io.file import PARTIAL, partial_name, sync
from trt_eagle3.errors import UserError

__all__ = ["OutputLock", "lock_file_of", "output_lock"]

_MAGIC = b"trt-eagle3 lock: a build writes beside this file, or was killed\n"
_MAX_BYTES = 1 << 20
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


def lock_file_of(path: Path) -> Path:
    """Return the lock file of output ``path`` during a write; it is beside the output."""
    return path.with_name(f".{path.name}.trt-eagle3.lock")


@contextlib.contextmanager
def output_lock(path: Path, shown: Path | None = None) -> Iterator[OutputLock]:
    """Hold the lock of output ``path``; ``shown`` names it in errors.

    Links in ``path`` must be resolved and its folder must exist. The lock is ``flock`` on
    ``lock_file_of(path)``, not a process id. It works for all processes and containers that share
    the volume (over NFS as a lock on the server). The kernel releases it when its holder dies. File
    systems without locks do not separate writers: each works in its own folder, the last exchange
    wins, and what a killed writer left is not removed.

    Raises:
        UserError: another writer holds it, or a file that is not ours has its name.
    """
    file = lock_file_of(path)
    fd = _acquire(file, shown or path)
    lock = OutputLock(path, fd)
    try:
        yield lock
    finally:
        if fd is not None:
            if not lock.leftovers():
                file.unlink(missing_ok=True)  # while the lock is held: see _is_current
            os.close(fd)


class OutputLock:
    """A held lock.

    Its file lists its holder's unfinished folders, so that the next holder can remove them.
    """

    def __init__(self, path: Path, fd: int | None) -> None:
        """``fd``: descriptor of the locked file; None if the file system has no locks."""
        self._path = path
        self._fd = fd

    def make_partial(self) -> Path:
        """Create an empty folder beside the output. The lock's file lists it before it exists."""
        partial = partial_name(self._path)
        if self._fd is not None:
            os.lseek(self._fd, 0, os.SEEK_END)
            head = b"" if os.fstat(self._fd).st_size else _MAGIC
            os.write(self._fd, head + os.fsencode(partial.name) + b"\n")
            os.fsync(self._fd)
            sync(partial.parent)
        partial.mkdir()
        return partial

    def leftovers(self) -> list[Path]:
        """List existing folders that the lock's file names.

        Only names of the form that ``make_partial`` creates count.
        """
        if self._fd is None:
            return []
        lines = os.pread(self._fd, _MAX_BYTES, 0).splitlines()[1:]
        ours = re.compile(re.escape(os.fsencode(self._path.name + PARTIAL)) + rb"[0-9a-f]{16}")
        partials = [
            self._path.with_name(os.fsdecode(line)) for line in lines if ours.fullmatch(line)
        ]
        places = [place for p in partials for place in (p, p.with_name(p.name + ASIDE))]
        return [place for place in places if os.path.lexists(place)]

    def sweep(self) -> None:
        """Remove what killed writers left, and restore a folder that one of them moved aside.

        The held lock proves that those writers are dead. Its file does not list folders that only
        have similar names.
        """
        left = self.leftovers()
        for old in (
            place
            for place in left
            if place.name.endswith(ASIDE) and not os.path.lexists(self._path)
        ):
            old.rename(self._path)
        for place in left:
            shutil.rmtree(place, ignore_errors=True)
        if self._fd is not None and not self.leftovers():
            os.ftruncate(self._fd, 0)


def _acquire(file: Path, path: Path) -> int | None:
    while True:
        fd = os.open(
            file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
        )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_current(fd, file):
                _check_ours(fd, file)
                return fd
        except BlockingIOError as error:
            os.close(fd)
            line = (
                f"{path}: another build or deployment is writing it. Wait for it, or name another "
                "place."
            )
            raise UserError(line) from error
        except OSError as error:
            os.close(fd)
            if error.errno not in _NO_LOCKS:
                raise
            file.unlink(missing_ok=True)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its last holder has removed the file meanwhile


def _is_current(fd: int, file: Path) -> bool:
    """Return whether ``file`` is still the opened file: a holder removes it before releasing."""
    try:
        return os.path.samestat(os.fstat(fd), file.lstat())
    except FileNotFoundError:
        return False


def _check_ours(fd: int, file: Path) -> None:
    facts = os.fstat(fd)
    head = os.pread(fd, len(_MAGIC), 0) if stat.S_ISREG(facts.st_mode) else b"?"
    if facts.st_nlink != 1 or (head and not _MAGIC.startswith(head)):
        raise UserError(f"{file}: not a lock of trt-eagle3, which needs this name. Move it away.")
