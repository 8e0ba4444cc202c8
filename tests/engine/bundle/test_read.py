"""Every load checks the bundle: schema, completeness, and that the weights are those it was
built with.
"""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from tests.reference.checkpoint import write_tensors
from trt_eagle3.atomic_io import PARTIAL
from trt_eagle3.config import BuildConfig, TargetConfig
from trt_eagle3.engine.bundle.check import header_digest
from trt_eagle3.engine.bundle.read import read_bundle
from trt_eagle3.engine.bundle.record import (
    BUNDLE_FILE,
    SCHEMA_VERSION,
    BundleRecord,
    EngineRecord,
    FileRecord,
    SourceRecord,
    TensorRecord,
)
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.errors import UserError

WEIGHTS = "weights/target/model.safetensors"


@pytest.fixture
def table() -> torch.Tensor:
    return torch.randn(8, 4).bfloat16()


@pytest.fixture
def bundle(tmp_path: Path, table: torch.Tensor) -> Path:
    """The smallest bundle that loads: one weight file with a token table."""
    path = tmp_path / "tiny"
    file = path / WEIGHTS
    file.parent.mkdir(parents=True)
    ref = write_tensors(file, {"norm.weight": torch.ones(4), "embed_tokens.weight": table})[
        "embed_tokens.weight"
    ]
    record = FileRecord(size=file.stat().st_size, header_sha256=header_digest(file))
    write_record(
        path,
        BundleRecord(
            schema_version=SCHEMA_VERSION,
            tool_version="0",
            created_at="2026-01-01T00:00:00+00:00",
            config=BuildConfig(name="tiny", target=TargetConfig(checkpoint="somewhere")),
            sources={
                "target": SourceRecord(
                    checkpoint="x", revision=None, path="/x", files={WEIGHTS: record}
                )
            },
            weights="contained",
            target={},
            draft=None,
            draft_tensors={},
            engine=EngineRecord(backend="onnxruntime", dtype="float32", versions={}),
            embedding=TensorRecord(
                location=WEIGHTS,
                **{
                    name: getattr(ref, name)
                    for name in ("name", "offset", "num_bytes", "dtype", "shape")
                },
            ),
        ),
    )
    return path


def write_record(path: Path, record: BundleRecord) -> None:
    (path / BUNDLE_FILE).write_text(record.model_dump_json())


def edit(path: Path, **changes: Any) -> None:
    file = path / BUNDLE_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        read_bundle(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_read_bundle_returns_what_was_recorded(bundle: Path, table: torch.Tensor) -> None:
    record = read_bundle(bundle)
    assert record.config.name == "tiny"
    embedding = EmbeddingTable(record.embedding.ref(record.weights_root(bundle)), torch.float32)
    ids = torch.tensor([[5, 0], [7, 5]])
    assert embedding.hidden_size == 4
    assert torch.equal(embedding.lookup(ids), table[ids].float())


def test_referenced_weights_are_found_under_the_root_of_the_file_system(bundle: Path) -> None:
    moved = bundle.parent / "checkpoint.safetensors"
    (bundle / WEIGHTS).rename(moved)
    location = str(moved).lstrip("/")
    record = json.loads((bundle / BUNDLE_FILE).read_text())
    files = record["sources"]["target"]["files"]
    files[location] = files.pop(WEIGHTS)
    edit(
        bundle,
        weights="reference",
        sources=record["sources"],
        embedding={**record["embedding"], "location": location},
    )
    read = read_bundle(bundle)
    assert read.embedding.ref(read.weights_root(bundle)).file == moved


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, None])
def test_other_schema_version_is_refused_with_the_command_that_mends_it(
    bundle: Path, version: int | None
) -> None:
    edit(bundle, schema_version=version)
    message = refusal(bundle)
    assert f"bundle schema version {version}, this trt-eagle3 reads {SCHEMA_VERSION}" in message
    assert "trt-eagle3 build" in message


def test_unfinished_bundle_is_refused_even_where_its_files_are_all_there(bundle: Path) -> None:
    partial = bundle.rename(bundle.with_name(f"tiny{PARTIAL}123"))
    assert "an unfinished build, not a bundle" in refusal(partial)


def test_place_that_is_not_utf8_is_refused(bundle: Path) -> None:
    moved = bundle.rename(bundle.with_name("bundle\udcff"))
    with pytest.raises(UserError, match="must be UTF-8"):
        read_bundle(moved)


def test_missing_folder_and_a_file_in_its_place_are_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "file"):
        assert f"{path}: no bundle here" in refusal(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000])
def test_damaged_record_is_refused(bundle: Path, content: bytes) -> None:
    (bundle / BUNDLE_FILE).write_bytes(content)
    assert "Rebuild: trt-eagle3 build" in refusal(bundle)


def test_record_with_an_unknown_or_missing_key_is_refused_by_name(bundle: Path) -> None:
    edit(bundle, colour="red")
    assert "colour" in refusal(bundle)
    raw = json.loads((bundle / BUNDLE_FILE).read_text())
    del raw["colour"], raw["embedding"]
    (bundle / BUNDLE_FILE).write_text(json.dumps(raw))
    assert "embedding: Field required" in refusal(bundle)


def test_missing_weight_file_is_refused_by_name(bundle: Path) -> None:
    (bundle / WEIGHTS).unlink()
    assert f"{bundle / WEIGHTS}: a weight file of this bundle is missing" in refusal(bundle)


def test_weight_file_that_cannot_be_read_is_refused(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(_: Path) -> BinaryIO:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("trt_eagle3.engine.bundle.check.open_regular", denied)
    assert "cannot read it: Permission denied" in refusal(bundle)


def test_weight_file_of_another_size_is_refused(bundle: Path) -> None:
    file = bundle / WEIGHTS
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    assert f"expected {size} bytes, got {size - 1}" in refusal(bundle)


def test_weight_file_with_another_header_is_refused(bundle: Path) -> None:
    file = bundle / WEIGHTS
    file.write_bytes(file.read_bytes().replace(b"norm.weight", b"morn.weight"))
    assert "its safetensors header is not the one" in refusal(bundle)


@pytest.mark.parametrize("length", [b"\xff" * 8, (1 << 45).to_bytes(8, "little")])
def test_weight_file_whose_header_would_reach_past_its_end_is_refused(
    bundle: Path, length: bytes
) -> None:
    file = bundle / WEIGHTS
    file.write_bytes(length + file.read_bytes()[8:])
    assert "its safetensors header is not the one" in refusal(bundle)


def test_embedding_table_refuses_a_type_that_is_no_float(bundle: Path) -> None:
    record = read_bundle(bundle)
    ref = replace(record.embedding.ref(record.weights_root(bundle)), dtype="I8")
    with pytest.raises(UserError, match="expected float32, float16 or bfloat16, got I8"):
        EmbeddingTable(ref, torch.float32)


def test_embedding_table_of_a_file_cut_short_is_one_line(bundle: Path) -> None:
    record = read_bundle(bundle)
    (bundle / WEIGHTS).write_bytes(b"short")
    with pytest.raises(UserError, match=r"cannot map embed_tokens\.weight") as error:
        EmbeddingTable(record.embedding.ref(record.weights_root(bundle)), torch.float32)
    assert "\n" not in str(error.value)
