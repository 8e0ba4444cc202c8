"""Write a folder atomically, and replace an older one of ours without a gap for readers."""

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
    """Check that an output is absent, empty, or an older folder of ours. Links are resolved.

    Raises:
        UserError: it has other content, or cannot be read.
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
    """Create a folder that becomes ``path`` if the block succeeds, and is removed otherwise.

    1. Lock the output, and remove what killed writers left.
    2. The block writes into a folder of a random name beside ``path``.
    3. Sync its contents, move it to ``path`` (``exchange``), and sync the parent folder.
    4. Remove the older folder.

    If ``path`` is a link, its target is replaced.

    Args:
        kind: kind of the folder, which gets a manifest. An older folder of the same kind is
            replaced. None: no folder is replaced.
    Raises:
        UserError: another writer is active, the disk is full, ``path`` cannot be written, or it
            has content that is not ours.
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
    """Rename ``partial`` to ``place``. An older folder then has the name ``partial``."""
    if not os.path.lexists(place):
        partial.rename(place)  # fails on anything but an empty folder created meanwhile
        sync(place.parent)
        return
    check_ours(place, kind)  # a build takes minutes, so a file may have been created there
    exchange(partial, place)
    try:
        check_ours(partial, kind)
        sync(place.parent)
    except BaseException:  # including Ctrl-C
        exchange(partial, place)
        raise


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path))
