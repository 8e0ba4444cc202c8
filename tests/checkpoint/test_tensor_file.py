"""Weights on disk: durable when they appear, and never half of them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.atomic_io.test_file import left_in, record_syncs
from tests.multimodal.bombs import open_files
from trt_eagle3.atomic_io import PARTIAL
from trt_eagle3.checkpoint import tensor_file
from trt_eagle3.checkpoint.tensor_file import (
    Content,
    array_content,
    read_integers,
    ref_content,
    write_tensors,
)
from trt_eagle3.checkpoint.tensor_index import open_file
from trt_eagle3.engine.runtime.weights import read_chunks
from trt_eagle3.errors import UserError


def test_write_tensors_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = record_syncs(monkeypatch)
    replace = Path.replace

    def recorded(source: Path, target: Path) -> Path:
        events.append(f"rename {target}")
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", recorded)
    file = tmp_path / "t.safetensors"
    write_tensors(file, {"ids": array_content(np.arange(3))})
    assert [event.split(PARTIAL)[0] for event in events] == [
        f"sync {file}",
        f"rename {file}",
        f"sync {tmp_path}",
    ]
    assert read_integers(open_file(file)["ids"]).tolist() == [0, 1, 2]


def test_write_tensors_that_fails_leaves_the_old_file_and_its_links_alone(tmp_path: Path) -> None:
    file = tmp_path / "t.safetensors"
    write_tensors(file, {"ids": array_content(np.arange(3))})
    (tmp_path / "linked").hardlink_to(file)
    before = file.read_bytes()

    def full() -> Iterator[bytes]:
        yield b"1234"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="cannot write it: No space left on device"):
        write_tensors(file, {"ids": Content("I64", (1,), full)})
    assert left_in(tmp_path) == ["linked", "t.safetensors"]
    assert file.read_bytes() == before
    write_tensors(file, {"ids": array_content(np.arange(4))})
    assert (tmp_path / "linked").read_bytes() == before


def test_tensor_read_half_way_holds_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "_CHUNK_BYTES", 10)
    file = tmp_path / "t.safetensors"
    write_tensors(file, {"ids": array_content(np.arange(3))})
    ref = open_file(file)["ids"]
    sizes = iter([10, 10, 4])
    for chunks in (iter(ref_content(ref).chunks()), read_chunks("ids", file, ref.offset, sizes)):
        first = bytes(next(chunks))
        assert open_files(tmp_path) == []
        assert first + b"".join(chunks) == np.arange(3).tobytes()


def test_tensor_cut_short_while_it_is_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "_CHUNK_BYTES", 10)
    file = tmp_path / "t.safetensors"
    write_tensors(file, {"ids": array_content(np.arange(3))})
    ref = open_file(file)["ids"]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="ids is cut short"):
        read_integers(ref)
