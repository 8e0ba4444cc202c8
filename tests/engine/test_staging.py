"""Bundles on disk: all or nothing, whatever happens in between; weights placed without copying where that can be."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trt_eagle3.engine import staging
from trt_eagle3.engine.bundle import PARTIAL, read_bundle
from trt_eagle3.engine.staging import atomic_directory, place_file, replace_file, write_file
from trt_eagle3.errors import UserError

KILLED_BUILD = """
import sys, time
from pathlib import Path
from trt_eagle3.engine.staging import atomic_directory, write_file

with atomic_directory(Path(sys.argv[1])) as folder:
    write_file(folder / "target" / "model.onnx", b"half")
    print("half way", flush=True)
    time.sleep(60)
"""


def build(path: Path, content: bytes = b"new") -> None:
    with atomic_directory(path) as folder:
        write_file(folder / "target" / "model.onnx", content)


def left_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_atomic_directory_appears_at_the_end_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "engines" / "tiny"
    with atomic_directory(path) as folder:
        assert folder.parent == path.parent
        assert folder.name.startswith(f"tiny{PARTIAL}")
        assert not path.exists()
        write_file(folder / "a", b"1")
    assert left_in(path.parent) == ["tiny"]
    assert (path / "a").read_bytes() == b"1"


def test_atomic_directory_replaces_an_older_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "stale").write_text("old")
    build(path)
    assert left_in(path) == ["target"]
    assert left_in(tmp_path) == ["tiny"]


@pytest.mark.parametrize("error", [UserError("no"), KeyboardInterrupt(), ZeroDivisionError()])
def test_atomic_directory_that_fails_leaves_the_older_one_and_nothing_else(
    tmp_path: Path, error: BaseException
) -> None:
    path = tmp_path / "tiny"
    build(path, b"old")

    def fail() -> None:
        with atomic_directory(path) as folder:
            write_file(folder / "target" / "model.onnx", b"half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert left_in(tmp_path) == ["tiny"]
    assert (path / "target" / "model.onnx").read_bytes() == b"old"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: Any, code: int) -> None:
    real = Path.write_bytes

    def write_half(path: Path, data: bytes) -> None:
        real(path, data[: len(data) // 2])
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(UserError, match=r"tiny: cannot write the bundle: the disk is full. Nothing was left") as error:
        build(tmp_path / "tiny")
    assert "\n" not in str(error.value)
    assert left_in(tmp_path) == []


def test_disk_that_fills_while_a_weight_file_is_copied_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    source = tmp_path / "w.safetensors"
    source.write_bytes(b"weights")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fcntl, "ioctl", full)
    monkeypatch.setattr(Path, "hardlink_to", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(UserError, match="the disk is full"), atomic_directory(tmp_path / "out" / "tiny") as folder:
        place_file(source, folder / "weights" / "w.safetensors")
    assert left_in(tmp_path / "out") == []
    assert source.read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("failure", "seen"),
    [(OSError(errno.EIO, "Input/output error"), UserError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_rename_that_fails_puts_the_older_bundle_back(
    failure: BaseException, seen: type[BaseException], tmp_path: Path, monkeypatch: Any
) -> None:
    path = tmp_path / "tiny"
    build(path, b"old")
    real = Path.rename

    def rename(source: Path, target: Path) -> Path:
        if target == path and "old" not in source.name:
            raise failure
        return real(source, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(
        seen, match=None if seen is KeyboardInterrupt else "cannot write the bundle: Input/output error"
    ):
        build(path)
    assert left_in(tmp_path) == ["tiny"]
    assert (path / "target" / "model.onnx").read_bytes() == b"old"


def test_killed_build_leaves_no_bundle_and_the_next_build_sweeps_it(tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    command = [sys.executable, "-c", KILLED_BUILD, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half way\n"
        running = left_in(tmp_path)
        assert running == [f"tiny{PARTIAL}{process.pid}"]
        build(tmp_path / "other")  # a build of another bundle leaves it alone
        staging._sweep(path)  # so does one of the same bundle while the first is alive
        assert left_in(tmp_path) == ["other", *running]
        process.send_signal(signal.SIGKILL)
    with pytest.raises(UserError, match="an unfinished build, not a bundle"):
        read_bundle(tmp_path / running[0])
    with pytest.raises(UserError, match="no bundle here"):
        read_bundle(path)
    build(path)
    assert left_in(tmp_path) == ["other", "tiny"]


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
        monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert place_file(source, destination) == expected
    assert destination.read_bytes() == b"weights"
    assert destination.samefile(source) == (expected == "hard link")
    assert calls == ([0x40049409] if reflink else [])


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


def test_bundle_moved_aside_by_a_killed_build_is_put_back(tmp_path: Path) -> None:
    """A kill between the two renames leaves the old bundle under its partial name only."""
    old = tmp_path / f"tiny{PARTIAL}old-999999999"
    old.mkdir()
    (old / "bundle.json").write_text("{}")
    with pytest.raises(RuntimeError), atomic_directory(tmp_path / "tiny"):
        raise RuntimeError("this build fails too")
    assert (tmp_path / "tiny" / "bundle.json").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["tiny"]


def test_replaced_file_stays_what_it_was_where_it_is_linked(tmp_path: Path) -> None:
    replace_file(tmp_path / "new" / "report.json", "old")
    (tmp_path / "deployed.json").hardlink_to(tmp_path / "new" / "report.json")
    replace_file(tmp_path / "new" / "report.json", "new")
    assert (tmp_path / "new" / "report.json").read_text() == "new"
    assert (tmp_path / "deployed.json").read_text() == "old"


def test_replacement_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_file(tmp_path / "report.json", "old")

    def full(path: Path, data: bytes) -> None:
        real(path, data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    real = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "report.json", "new")
    assert left_in(tmp_path) == ["report.json"]
    assert (tmp_path / "report.json").read_text() == "old"
