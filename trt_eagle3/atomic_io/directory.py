"""Write a folder, whole or not at all, and replace an older one of ours so that no reader finds
nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from trt_eagle3.atomic_io.exchange import exchange
from trt_eagle3.atomic_io.file import PARTIAL, make_parents, sync, sync_tree
from trt_eagle3.atomic_io.lock import output_lock
from trt_eagle3.atomic_io.manifest import FolderKind, check_ours, write_manifest
from trt_eagle3.errors import UserError

__all__ = ["atomic_directory", "check_replaceable"]

_NEW = FolderKind("new folder", recognise=lambda _: "it is not empty")


def check_replaceable(path: Path, kind: FolderKind) -> None:
    """Refuse an output that holds anything but an older folder of ours; what a link points to
    counts.

    Raises:
        UserError: it does, or it cannot be looked at.
    """
    if PARTIAL in path.name:
        raise UserError(
            f"{path}: {PARTIAL} marks unfinished builds, which are swept. Choose another name."
        )
    place = _resolved(path)
    try:
        if os.path.lexists(place):
            check_ours(place, kind)
    except OSError as error:
        raise UserError(
            f"{path}: cannot write the {kind.name}: {error.strerror}. Name another place."
        ) from error


@contextlib.contextmanager
def atomic_directory(path: Path, kind: FolderKind | None = None) -> Iterator[Path]:
    """Make a folder to write in that becomes ``path`` when the block ends well, and vanishes when
    it does not.

    1. The lock of the output is taken, and what killed writers left is swept.
    2. The block writes into a folder of a random name beside ``path``.
    3. All that is in it is synced, it takes the place of ``path`` (``exchange``), and their folder
    is synced.
    4. The older folder is removed.

    Where ``path`` is a link, what it points to is replaced.

    Args:
        kind: of the folder, which gets a manifest; an older one of the same kind is replaced. None:
            nothing is.
    Raises:
        UserError: another writer is at work, the disk is full, ``path`` cannot be written, or holds
            what is not ours.
    """
    rule = kind or _NEW
    place = _resolved(path)
    try:
        make_parents(place)
        with output_lock(place, path) as lock:
            lock.sweep()
            check_replaceable(path, rule)
            partial = lock.make_partial()
            try:
                yield partial
                if kind:
                    write_manifest(partial, kind)
                sync_tree(partial)
                _publish(partial, place, rule)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        reason = "the disk is full" if full else (error.strerror or str(error))
        raise UserError(
            f"{path}: cannot write the {rule.name}: {reason}. Nothing was left behind."
        ) from error


def _publish(partial: Path, place: Path, kind: FolderKind) -> None:
    """Give ``partial`` the name ``place``; afterwards an older folder has the name ``partial``."""
    if not os.path.lexists(place):
        partial.rename(place)  # fails on anything but an empty folder that came meanwhile
        sync(place.parent)
        return
    check_ours(place, kind)  # a build takes minutes, and somebody may have put a file there
    exchange(partial, place)
    try:
        check_ours(partial, kind)
        sync(place.parent)
    except BaseException:  # Ctrl-C too
        exchange(partial, place)
        raise


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path))
