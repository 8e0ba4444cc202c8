"""``files.json``: the list of files that this program wrote, to protect all other files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trt_eagle3.atomic_io.file import PARTIAL, create_file
from trt_eagle3.errors import UserError, quote
from trt_eagle3.io.json_file import read_json_object

__all__ = ["MANIFEST_FILE", "FolderKind", "check_ours", "write_manifest"]

MANIFEST_FILE = "files.json"
_UNFINISHED = re.compile(re.escape(PARTIAL) + "[0-9a-f]{16}$")


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder that this program writes and may replace.

    Attributes:
        name: name in messages and in its manifest.
        additions: regular expression of files that our commands add later, as relative posix
            paths. A folder that may be empty ends in a slash.
        recognise: returns why a folder is not of the kind; empty if it is. It is called before the
            manifest is compared.
    """

    name: str
    additions: str = ""
    recognise: Callable[[Path], str] = lambda _: ""


def write_manifest(folder: Path, kind: FolderKind) -> None:
    """List every file of ``folder`` in its ``files.json``."""
    files = sorted({*_entries(folder), MANIFEST_FILE} - {"./"})
    text = json.dumps({"written_by": "trt-eagle3", "kind": kind.name, "files": files}, indent=1)
    create_file(folder / MANIFEST_FILE, text.encode())


def check_ours(folder: Path, kind: FolderKind) -> None:
    """Check that ``folder`` is empty, or ours without files of another origin.

    Raises:
        UserError: it is neither. The message names the first foreign file.
    """
    if not folder.is_dir():
        raise _refusal(folder, kind, "a file is there")
    if next(folder.iterdir(), None) is None:
        return
    listed = _listed(folder, kind)
    reason = kind.recognise(folder) or (
        "" if listed else f"it has no {MANIFEST_FILE} of trt-eagle3"
    )
    if reason:
        raise _refusal(folder, kind, reason)
    known = re.compile(kind.additions)
    for entry in _entries(folder):
        written = _UNFINISHED.sub("", entry)
        if written not in listed and not known.fullmatch(written):
            raise _refusal(folder, kind, f"it holds {quote(entry)}, which trt-eagle3 did not write")


def _refusal(folder: Path, kind: FolderKind, reason: str) -> UserError:
    return UserError(
        f"{folder}: expected a {kind.name} of trt-eagle3 or nothing there, to replace it: "
        f"{reason}. Move it away, or choose another name."
    )


def _listed(folder: Path, kind: FolderKind) -> set[str]:
    """Return the files and (with a trailing slash) folders of a valid manifest; else empty."""
    try:
        raw = read_json_object(folder / MANIFEST_FILE)
        ours = raw["written_by"] == "trt-eagle3" and raw["kind"] == kind.name
        files = {str(file) for file in raw["files"]} if ours else set()
    except (OSError, UserError, KeyError, TypeError):
        return set()
    return files | {f"{parent}/" for file in files for parent in Path(file).parents}


def _raise(error: OSError) -> None:
    raise error


def _entries(folder: Path) -> Iterator[str]:
    """Yield relative posix paths of all files, links and (with a trailing slash) empty folders.

    Links are not followed.
    """
    for place, folders, files in os.walk(folder, onerror=_raise):
        links = [name for name in folders if Path(place, name).is_symlink()]
        for name in sorted((*files, *links)):
            yield Path(place, name).relative_to(folder).as_posix()
        if not folders and not files:
            yield f"{Path(place).relative_to(folder).as_posix()}/"
