"""Single files: never half of one, never another name's content, and on the disk before anyone
hears of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from trt_eagle3.atomic_io import PARTIAL, atomic_file, create_file, place_file, write_file
from trt_eagle3.atomic_io.file import sync_tree
from trt_eagle3.errors import UserError


def left_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_create_file_of_a_name_that_exists_leaves_it_as_it_is(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(b"mine")
    (tmp_path / "hard").hardlink_to(weights)
    (tmp_path / "soft").symlink_to(weights)
    (tmp_path / "dangling").symlink_to(tmp_path / "elsewhere")
    for name in ("hard", "soft", "dangling"):
        with pytest.raises(FileExistsError):
            create_file(tmp_path / name, b"ours")
    assert weights.read_bytes() == b"mine"
    assert not (tmp_path / "elsewhere").exists()


def test_write_file_of_a_linked_name_leaves_the_other_names_content(tmp_path: Path) -> None:
    file = tmp_path / "new" / "report.json"
    write_file(file, b"old")
    (tmp_path / "deployed.json").hardlink_to(file)
    write_file(file, b"new")
    assert file.read_bytes() == b"new"
    assert (tmp_path / "deployed.json").read_bytes() == b"old"


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_atomic_file_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: BaseException
) -> None:
    write_file(tmp_path / "report.json", b"old")

    def fail() -> None:
        with atomic_file(tmp_path / "report.json") as stream:
            stream.write(b"ne")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert left_in(tmp_path) == ["report.json"]
    assert (tmp_path / "report.json").read_bytes() == b"old"


def test_atomic_file_is_synced_before_its_rename_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = record_syncs(monkeypatch)
    replace = Path.replace

    def recorded(source: Path, target: Path) -> Path:
        events.append(f"rename {target.name}")
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", recorded)
    write_file(tmp_path / "a" / "b" / "f", b"1")
    assert [event.split(PARTIAL)[0] for event in events] == [
        f"sync {tmp_path}/a",
        f"sync {tmp_path}",
        f"sync {tmp_path}/a/b/f",
        "rename f",
        f"sync {tmp_path}/a/b",
    ]


def record_syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    events: list[str] = []
    fsync = os.fsync

    def recorded(fd: int) -> None:
        events.append(f"sync {Path(f'/proc/self/fd/{fd}').readlink()}")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", recorded)
    return events


def test_sync_tree_syncs_links_targets_never_and_all_else_deepest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_file(tmp_path / "a" / "b" / "f", b"1")
    (tmp_path / "a" / "link").symlink_to("/dev/null")
    events = record_syncs(monkeypatch)
    sync_tree(tmp_path)
    assert events == [f"sync {tmp_path}{place}" for place in ("/a/b/f", "/a/b", "/a", "")]


def refuse(*_: Any) -> None:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


@pytest.mark.parametrize(
    ("reflink", "hard_link", "expected"),
    [(True, True, "reflink"), (False, True, "hard link"), (False, False, "copy")],
)
def test_place_file_prefers_reflink_then_hard_link_then_copy(
    tmp_path: Path, monkeypatch: Any, reflink: bool, hard_link: bool, expected: str
) -> None:
    source, destination = tmp_path / "blob", tmp_path / "weights" / "w"
    source.write_bytes(b"weights")
    calls = []

    def clone(target: int, request: int, origin: int) -> None:
        calls.append(request)
        os.write(target, os.read(origin, 100))

    monkeypatch.setattr(fcntl, "ioctl", clone if reflink else refuse)
    if not hard_link:
        monkeypatch.setattr(os, "link", refuse)
    assert place_file(source, destination) == expected
    assert destination.read_bytes() == b"weights"
    assert destination.samefile(source) == (expected == "hard link")
    assert calls == ([0x40049409] if reflink else [])


def test_place_file_without_links_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "ioctl", refuse)
    (tmp_path / "library.so").write_bytes(b"1")
    assert place_file(tmp_path / "library.so", tmp_path / "copy.so", link=False) == "copy"
    assert not (tmp_path / "copy.so").samefile(tmp_path / "library.so")


@pytest.mark.parametrize("reflink", [True, False])
def test_place_file_onto_a_hard_link_of_its_source_truncates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reflink: bool
) -> None:
    """As another build had left it: the name was opened for writing, and the checkpoint was
    empty.
    """
    if not reflink:
        monkeypatch.setattr(fcntl, "ioctl", refuse)
    source = tmp_path / "model.safetensors"
    source.write_bytes(b"weights")
    (tmp_path / "placed").hardlink_to(source)
    for link in (True, False):
        with pytest.raises(FileExistsError):
            place_file(source, tmp_path / "placed", link=link)
    assert source.read_bytes() == b"weights"
    assert left_in(tmp_path) == ["model.safetensors", "placed"]


def test_place_file_whose_copy_fails_removes_its_own_file_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for owner, name in ((fcntl, "ioctl"), (os, "link"), (shutil, "copyfileobj")):
        monkeypatch.setattr(owner, name, full)
    (tmp_path / "w").write_bytes(b"weights")
    with pytest.raises(OSError, match="No space left"):
        place_file(tmp_path / "w", tmp_path / "out" / "w")
    assert left_in(tmp_path / "out") == []
    assert (tmp_path / "w").read_bytes() == b"weights"


def test_place_file_of_a_link_places_what_it_points_to(tmp_path: Path) -> None:
    blob, link = tmp_path / "blobs" / "abc", tmp_path / "snapshot" / "model.safetensors"
    blob.parent.mkdir()
    link.parent.mkdir()
    blob.write_bytes(b"weights")
    link.symlink_to(Path("..") / "blobs" / "abc")
    destination = tmp_path / "weights" / "model.safetensors"
    place_file(link, destination)
    assert not destination.is_symlink()
    assert destination.read_bytes() == b"weights"


def test_place_file_of_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match="expected a regular file, got a FIFO"):
        place_file(tmp_path / "fifo", tmp_path / "copy", link=False)
    assert left_in(tmp_path) == ["fifo"]
