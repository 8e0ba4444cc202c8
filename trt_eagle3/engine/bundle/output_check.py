"""Keep outputs apart from their sources, so that no output replaces, contains or lies in a
checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from trt_eagle3.engine.bundle.record import BundleRecord
from trt_eagle3.errors import UserError

__all__ = ["check_apart", "check_not_around", "source_folders", "weight_paths"]

_FIX = "Name another place"


def check_apart(output: Path, folders: Iterable[Path], what: str) -> None:
    """Refuse an output that is, contains or lies in one of ``folders``; links are resolved.

    Raises:
        UserError: it does; ``what`` names the folders.
    """
    check_not_around(output, folders, what)
    for folder in folders:
        if _real(output).is_relative_to(_real(folder)):
            raise UserError(f"{output}: lies in {what} {folder}. {_FIX}.")


def check_not_around(output: Path, places: Iterable[Path], what: str) -> None:
    """Refuse an output that is or contains one of ``places``, files or folders; links are resolved.

    Raises:
        UserError: it does; ``what`` names them.
    """
    for place in places:
        if _real(place) == _real(output):
            raise UserError(f"{output}: is {what} {place}, which would be replaced. {_FIX}.")
        if _real(place).is_relative_to(_real(output)):
            raise UserError(f"{output}: contains {what} {place}, which would be replaced. {_FIX}.")


def source_folders(record: BundleRecord) -> list[Path]:
    """Return the checkpoint folders of a bundle that exist on this machine."""
    return [folder for s in record.sources.values() if (folder := Path(s.path)).is_dir()]


def weight_paths(bundle: Path, record: BundleRecord) -> list[Path]:
    """Return every weight file of a bundle: in it, or elsewhere with ``weights: reference``."""
    return [record.weights_root(bundle) / location for location in record.weight_files()]


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
