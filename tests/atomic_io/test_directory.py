"""Folders on disk: all or nothing, whatever happens in between, and nobody else's files."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.atomic_io.points import CRASHED, in_child, start, watch
from tests.atomic_io.test_file import left_in, record_syncs
from trt_eagle3.atomic_io import (
    MANIFEST_FILE,
    PARTIAL,
    FolderKind,
    atomic_directory,
    create_file,
    directory,
    exchange,
    lock_file_of,
    write_file,
)
from trt_eagle3.errors import UserError

KIND = FolderKind("bundle", additions=r"tuning\.json|later/(report\.json)?")
PARTS = ("a", "sub/b", "sub/deeper/c")


def build(path: Path, content: str = "new", kind: FolderKind | None = KIND) -> None:
    with atomic_directory(path, kind) as folder:
        for part in PARTS:
            create_file(folder / part, content.encode())


def content_of(path: Path) -> set[str]:
    return {(path / part).read_text() for part in PARTS}


def without_renameat2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_renameat2", lambda: None)


def test_atomic_directory_appears_at_the_end_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "engines" / "tiny"
    with atomic_directory(path, KIND) as folder:
        assert re.fullmatch(r"tiny\.partial-[0-9a-f]{16}", folder.name)
        assert folder.parent == path.parent
        assert not path.exists()
        create_file(folder / "a", b"1")
    assert left_in(path.parent) == ["tiny"]
    assert left_in(path) == ["a", MANIFEST_FILE]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o777 & ~umask


@pytest.mark.parametrize("atomic", [True, False])
def test_atomic_directory_replaces_an_older_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    if not atomic:
        without_renameat2(monkeypatch)
    path = tmp_path / "tiny"
    with atomic_directory(path, KIND) as folder:
        create_file(folder / "stale", b"old")
    build(path)
    assert left_in(path) == ["a", MANIFEST_FILE, "sub"]
    assert left_in(tmp_path) == ["tiny"]


def test_empty_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    build(tmp_path / "tiny")
    assert content_of(tmp_path / "tiny") == {"new"}


@pytest.mark.parametrize("error", [UserError("no"), KeyboardInterrupt(), ZeroDivisionError()])
def test_atomic_directory_that_fails_leaves_the_older_one_and_nothing_else(
    tmp_path: Path, error: BaseException
) -> None:
    path = tmp_path / "tiny"
    build(path, "old")

    def fail() -> None:
        with atomic_directory(path, KIND) as folder:
            create_file(folder / "a", b"half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert left_in(tmp_path) == ["tiny"]
    assert content_of(path) == {"old"}


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize(
    ("failure", "seen"),
    [
        (OSError(errno.EIO, "Input/output error"), UserError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_failure_after_the_exchange_puts_the_older_folder_back(
    failure: BaseException,
    seen: type[BaseException],
    atomic: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "tiny"
    build(path, "old")
    if not atomic:
        without_renameat2(monkeypatch)
    swap = directory.exchange
    swaps = []

    def counted(new: Path, old: Path) -> None:
        swaps.append(new)
        swap(new, old)

    def sync(place: Path) -> None:
        if swaps and place == tmp_path:
            raise failure

    monkeypatch.setattr(directory, "exchange", counted)
    monkeypatch.setattr(directory, "sync", sync)
    with pytest.raises(seen, match="Input/output error" if seen is UserError else None):
        build(path)
    assert len(swaps) == 2
    assert left_in(tmp_path) == ["tiny"]
    assert content_of(path) == {"old"}


def test_rename_of_the_fallback_that_fails_puts_the_older_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny"
    build(path, "old")
    without_renameat2(monkeypatch)
    rename = Path.rename

    def fail(source: Path, target: Path) -> Path:
        if target == path and not source.name.endswith(exchange.ASIDE):
            raise OSError(errno.EIO, "Input/output error")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(UserError, match="cannot write the bundle: Input/output error"):
        build(path)
    assert left_in(tmp_path) == ["tiny"]
    assert content_of(path) == {"old"}


def test_everything_is_synced_before_the_exchange_and_the_old_folder_goes_after_the_parents_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny"
    build(path, "old")
    (tmp_path / "weights").write_bytes(b"1")
    events = record_syncs(monkeypatch)
    swap, rmtree = directory.exchange, shutil.rmtree
    monkeypatch.setattr(
        directory, "exchange", lambda new, old: (events.append("exchange"), swap(new, old))
    )
    monkeypatch.setattr(shutil, "rmtree", lambda old, **_: (events.append("remove"), rmtree(old)))
    with atomic_directory(path, KIND) as folder:
        create_file(folder / "sub" / "copy", b"1")
        (folder / "link").hardlink_to(tmp_path / "weights")
        (folder / "empty").mkdir()
        events.clear()
    swapped = events.index("exchange")
    files = {folder / name for name in ("", "sub", "sub/copy", "link", "empty", MANIFEST_FILE)}
    assert set(events[:swapped]) == {f"sync {str(file).rstrip('/')}" for file in files}
    assert events[:swapped][-1] == f"sync {folder}"
    assert events[swapped:] == ["exchange", f"sync {tmp_path}", "remove"]


# Other people's files


@pytest.mark.parametrize(
    "foreign", ["notes.txt", "sub/notes.txt", "mine/code.py", "a.partial-7", "empty/"]
)
def test_folder_that_holds_a_foreign_file_is_never_replaced(tmp_path: Path, foreign: str) -> None:
    path = tmp_path / "tiny"
    build(path, "old")
    mine = path / foreign
    mine.parent.mkdir(exist_ok=True)
    mine.mkdir() if foreign.endswith("/") else mine.write_text("mine")
    line = (
        rf"{path}: expected a bundle.*it holds '{foreign}', which trt-eagle3 did not write. Move it"
    )
    with pytest.raises(UserError, match=line):
        build(path)
    assert mine.exists()
    assert content_of(path) == {"old"}
    assert left_in(tmp_path) == ["tiny"]


def test_folder_with_a_link_in_place_of_a_folder_of_ours_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    build(path)
    (path / "sub").rename(tmp_path / "elsewhere")
    (path / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="it holds 'sub'"):
        build(path)
    assert (tmp_path / "elsewhere" / "b").exists()


def test_what_our_commands_add_and_their_unfinished_files_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    build(path, "old")
    write_file(path / "tuning.json", b"{}")
    (path / "later").mkdir()
    (path / "later" / f"report.json{PARTIAL}0123456789abcdef").touch()  # validate was killed
    build(path)
    assert left_in(path) == ["a", MANIFEST_FILE, "sub"]


@pytest.mark.parametrize(
    "manifest",
    [
        None,
        b"",
        b"[]",
        b"[" * 100_000,
        b"{}",
        b'{"written_by": "trt-eagle3", "kind": "model", "files": ["a"]}',
    ],
)
def test_folder_without_our_manifest_is_never_replaced(
    tmp_path: Path, manifest: bytes | None
) -> None:
    path = tmp_path / "tiny"
    build(path, "old")
    (path / MANIFEST_FILE).unlink()
    if manifest is not None:
        (path / MANIFEST_FILE).write_bytes(manifest)
    with pytest.raises(UserError, match=r"it has no files\.json of trt-eagle3\. Move it away"):
        build(path)
    assert content_of(path) == {"old"}


def test_manifest_that_is_a_fifo_blocks_nobody(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    os.mkfifo(tmp_path / "tiny" / MANIFEST_FILE)
    with pytest.raises(UserError, match=r"no files\.json"):
        build(tmp_path / "tiny")


def test_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "tiny").write_text("mine")
    with pytest.raises(UserError, match="a file is there"):
        build(tmp_path / "tiny")
    assert (tmp_path / "tiny").read_text() == "mine"


def test_file_put_there_during_the_build_stops_the_exchange(tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    build(path, "old")

    def disturbed() -> None:
        with atomic_directory(path, KIND) as folder:
            create_file(folder / "a", b"new")
            (path / "notes").write_text("mine")

    with pytest.raises(UserError, match="it holds 'notes'"):
        disturbed()
    assert (path / "notes").read_text() == "mine"
    assert content_of(path) == {"old"}
    assert left_in(tmp_path) == ["tiny"]


def test_folder_of_no_kind_replaces_nothing_and_has_no_manifest(tmp_path: Path) -> None:
    build(tmp_path / "draft", kind=None)
    assert left_in(tmp_path / "draft") == ["a", "sub"]
    with pytest.raises(UserError, match="it is not empty"):
        build(tmp_path / "draft", kind=None)


# Links


def test_link_stays_a_link_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    real, link = tmp_path / "disk" / "v1", tmp_path / "tiny"
    build(real, "old")
    link.symlink_to(real)
    build(link)
    assert link.is_symlink()
    assert content_of(real) == {"new"}
    assert left_in(tmp_path) == ["disk", "tiny"]
    assert left_in(real.parent) == ["v1"]


def test_link_to_nothing_is_built_where_it_points(tmp_path: Path) -> None:
    (tmp_path / "tiny").symlink_to(tmp_path / "disk" / "v1")
    build(tmp_path / "tiny")
    assert (tmp_path / "tiny").is_symlink()
    assert content_of(tmp_path / "disk" / "v1") == {"new"}


# Two writers, and killed ones


def test_second_writer_is_refused_in_one_line_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("tiny")
    for path in (tmp_path / "tiny", tmp_path / "link"):
        with atomic_directory(tmp_path / "tiny", KIND):
            with pytest.raises(
                UserError, match=f"{path}: another build or deployment is writing it. Wait"
            ):
                build(path)
            build(tmp_path / "other")
    assert left_in(tmp_path) == ["link", "other", "tiny"]


def build_slowly(path: Path) -> None:
    with atomic_directory(path, KIND) as folder:
        create_file(folder / "a", b"half")
        (path.parent / "half way").touch()
        time.sleep(60)


def test_killed_build_blocks_nobody_and_only_what_it_left_is_swept(tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    child = start(build_slowly, path)
    while not (tmp_path / "half way").exists():
        time.sleep(0.01)
    with pytest.raises(UserError, match="another build"):
        build(path)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    (tmp_path / "half way").unlink()
    lock, left = left_in(tmp_path)
    assert lock == lock_file_of(path).name
    lookalikes = [f"tiny{PARTIAL}{end}" for end in ("123", "0123456789abcdef", "old-1")]
    for name in lookalikes:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    build(path)
    assert left not in left_in(tmp_path)
    assert left_in(tmp_path) == sorted(["tiny", *lookalikes])


def test_names_in_a_lock_that_no_build_makes_are_not_swept(tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    child = start(build_slowly, path)
    while not (tmp_path / "half way").exists():
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    (tmp_path / "precious").mkdir()
    with lock_file_of(path).open("ab") as lock:
        lock.write(b"precious\n../precious\ntiny.partial-0123456789abcdef/../precious\n.\n")
    build(path)
    assert (tmp_path / "precious").is_dir()
    assert not lock_file_of(path).exists()


@pytest.mark.parametrize("kind", ["file", "hard link", "link", "folder", "FIFO"])
def test_lock_of_somebody_elses_is_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    path, lock, mine = tmp_path / "tiny", lock_file_of(tmp_path / "tiny"), tmp_path / "mine"
    mine.write_text("" if kind == "hard link" else "mine")
    makers = {
        "file": lambda: lock.write_text("mine"),
        "hard link": lambda: lock.hardlink_to(mine),
        "link": lambda: lock.symlink_to(mine),
        "folder": lock.mkdir,
        "FIFO": lambda: os.mkfifo(lock),
    }
    makers[kind]()
    with pytest.raises(UserError):
        build(path)
    assert left_in(tmp_path) == [lock.name, "mine"]
    assert mine.read_text() == ("" if kind == "hard link" else "mine")


def test_folder_moved_aside_by_a_killed_fallback_is_put_back(tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    build(path, "old")
    assert in_child(crash_in_fallback, path) == CRASHED
    assert not path.exists()
    with pytest.raises(RuntimeError), atomic_directory(path, KIND):
        raise RuntimeError("this build fails too")
    assert content_of(path) == {"old"}
    assert left_in(tmp_path) == ["tiny"]


def crash_in_fallback(path: Path) -> None:
    exchange._renameat2 = lambda: None  # type: ignore[assignment]
    rename = Path.rename
    Path.rename = lambda s, t: rename(s, t) if t != path else os._exit(CRASHED)
    build(path)


def crash_at(path: Path, at: int) -> None:
    count = watch(path.parent, at, "crash")
    build(path)
    (path.parent.parent / "count").write_text(str(count()))


def test_kill_at_any_file_operation_leaves_the_old_folder_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "engines" / "tiny"
    build(path, "old")
    assert in_child(crash_at, path, 0) == 0
    count = int((tmp_path / "count").read_text())
    assert count > 20
    seen = set()
    for at in range(1, count + 1):
        build(path, "old")
        assert in_child(crash_at, path, at) == CRASHED
        (found,) = content_of(path)
        seen.add(found)
        build(path, "next")
        assert left_in(path.parent) == ["tiny"]
    assert seen == {"old", "new"}


def fill_at(path: Path, at: int) -> None:
    count = watch(path.parent, at, "full")
    try:
        build(path)
    except UserError as error:
        if f"{path}: cannot write the bundle: the disk is full. Nothing was left behind." == str(
            error
        ):
            sys.exit(2)
        raise
    (path.parent.parent / "count").write_text(str(count()))


def test_disk_full_at_any_file_operation_is_one_line_and_leaves_the_old_folder_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "engines" / "tiny"
    build(path, "old")
    assert in_child(fill_at, path, 0) == 0
    build(path, "old")
    for at in range(1, int((tmp_path / "count").read_text()) + 1):
        assert in_child(fill_at, path, at) == 2
        assert content_of(path) == {"old"}
        assert left_in(path.parent) == ["tiny"]


def write_often(path: Path, name: str, count: int, locks: bool) -> None:
    """As in a container of its own: all have the same process id."""
    os.getpid = lambda: 7
    if not locks:
        import fcntl

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        fcntl.flock = refuse
    while count:
        try:
            build(path, name)
            count -= 1
        except UserError as error:
            if "another build or deployment is writing it" not in str(error):
                raise


@pytest.mark.parametrize("locks", [True, False])
def test_readers_always_find_one_whole_folder_while_writers_replace_it(
    tmp_path: Path, locks: bool
) -> None:
    path = tmp_path / "tiny"
    build(path, "w0")
    writers = [start(write_often, path, f"w{i}", 15, locks) for i in range(3)]
    reads, names = 0, set()
    while any(writer.is_alive() for writer in writers):
        names.add(json.loads((path / MANIFEST_FILE).read_text())["kind"])  # never FileNotFoundError
        reads += 1
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert names == {"bundle"}
    assert reads > 50
    assert len(content_of(path)) == 1
    assert left_in(tmp_path) == ["tiny"]


def test_threads_of_one_process_exclude_each_other_too(tmp_path: Path) -> None:
    refused = []

    def second() -> None:
        try:
            build(tmp_path / "tiny")
        except UserError as error:
            refused.append(error)

    with atomic_directory(tmp_path / "tiny", KIND):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert len(refused) == 1
