"""Special files, long files and other encodings are one line at once, not a hang."""

from __future__ import annotations

import os
import socket
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from trt_eagle3.errors import UserError
from trt_eagle3.io.bounded_read import open_regular, read_bounded, read_text_bounded


def _socket(file: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(file))


SPECIAL: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": _socket,
    "a device": lambda f: f.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_open_regular_special_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    SPECIAL[kind](tmp_path / "f")
    start = time.monotonic()
    with pytest.raises(UserError, match=f"expected a regular file, got {kind}"):
        open_regular(tmp_path / "f")
    assert time.monotonic() - start < 10


def test_open_regular_file_exchanged_for_a_fifo_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "f").touch()
    regular = (tmp_path / "f").stat()
    monkeypatch.setattr(Path, "stat", lambda _: regular)
    with pytest.raises(UserError, match="got a FIFO"):
        open_regular(tmp_path / "fifo")


def test_read_bounded_allocates_what_there_is_to_read(tmp_path: Path) -> None:
    """And not its bound, which may be more than a machine has."""
    (tmp_path / "f").write_bytes(b"12345")
    tracemalloc.start()
    try:
        assert read_bounded(tmp_path / "f", 64 << 20) == b"12345"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_read_bounded_reads_files_of_no_size() -> None:
    assert b"Name:" in read_bounded(Path("/proc/self/status"), 1 << 20)
    with pytest.raises(UserError, match="expected at most 5"):
        read_bounded(Path("/proc/self/status"), 5)


def test_read_bounded_at_and_past_the_bound(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    assert read_bounded(tmp_path / "link", 5) == b"12345"
    with pytest.raises(UserError, match="5 bytes long, expected at most 4"):
        read_bounded(tmp_path / "f", 4)
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "absent", 4)


def test_read_text_bounded_other_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("{}", encoding="utf-16")
    with pytest.raises(UserError, match="not UTF-8 at byte 0"):
        read_text_bounded(tmp_path / "f", 99)
