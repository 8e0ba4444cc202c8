"""A bundle on disk: its record, and the checks every load makes before anything runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.config import BuildConfig
from trt_eagle3.errors import UserError

__all__ = [
    "BUILD_SCRIPT",
    "BUNDLE_FILE",
    "PARTIAL",
    "REFERENCE_ROOT",
    "SCHEMA_VERSION",
    "BundleRecord",
    "EngineRecord",
    "FileRecord",
    "SourceRecord",
    "TensorRecord",
    "check_name",
    "header_digest",
    "read_bundle",
    "reference_location",
]

SCHEMA_VERSION = 1
BUNDLE_FILE = "bundle.json"
BUILD_SCRIPT = "build_engine.sh"
"""What a TensorRT bundle has in place of engines where none could be built."""
PARTIAL = ".partial-"
REFERENCE_ROOT = Path("/")
"""The weights root of graphs whose weights are left in their checkpoints."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(_Record):
    """A weight file: size in bytes, and the sha256 of its safetensors header."""

    size: int
    header_sha256: str


class SourceRecord(_Record):
    """Where a checkpoint came from. ``files``: location under the weights root -> what lay there."""

    checkpoint: str
    revision: str | None
    path: str
    files: Mapping[str, FileRecord]


class TensorRecord(_Record):
    """A tensor that is read outside the graphs, by location under the weights root."""

    location: str
    name: str
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]

    def ref(self, weights_root: Path) -> TensorRef:
        """Its place on disk."""
        return TensorRef(self.name, weights_root / self.location, self.offset, self.num_bytes, self.dtype, self.shape)


class EngineRecord(_Record):
    """What the graphs were made for."""

    backend: str
    dtype: str
    versions: Mapping[str, str]
    gpu_arch: str | None = None


class BundleRecord(_Record):
    """``bundle.json``.

    Attributes:
        weights: ``contained`` = under the bundle; ``reference`` = in the original checkpoints.
        target, draft: the resolved specs (``checkpoint.target.target_to_dict`` and ``manifest_to_dict``).
        embedding: the shared token table.
        draft_tensors: every tensor of the draft by canonical name (``checkpoint.manifest.DraftManifest.tensors``).
    """

    schema_version: int
    tool_version: str
    created_at: str
    config: BuildConfig
    sources: Mapping[str, SourceRecord]
    weights: Literal["contained", "reference"]
    target: Mapping[str, Any]
    draft: Mapping[str, Any] | None
    engine: EngineRecord
    embedding: TensorRecord
    draft_tensors: Mapping[str, TensorRecord]

    def weights_root(self, bundle: Path) -> Path:
        """The folder that weight locations are relative to."""
        return bundle if self.weights == "contained" else REFERENCE_ROOT


def reference_location(ref: TensorRef) -> str:
    """Location of a tensor's own file under ``REFERENCE_ROOT``; links are followed, because sessions refuse them."""
    return str(ref.file.resolve().relative_to(REFERENCE_ROOT))


def check_name(path: Path) -> None:
    """Refuse a bundle's place whose name is not UTF-8: neither ONNX Runtime nor the tokenizer could open its files.

    Raises:
        UserError: it is not.
    """
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{path}: a bundle's path must be UTF-8. Name another place, or rename the folder.") from error


def header_digest(file: Path) -> str:
    """sha256 of a safetensors header: names, types, shapes and offsets of all its tensors.

    Of a file whose header would reach past its end, of the header's length alone.
    """
    whole = file.stat().st_size
    with file.open("rb") as stream:
        size = stream.read(8)
        length = int.from_bytes(size, "little")
        return hashlib.sha256(size + (stream.read(length) if length <= whole - 8 else b"")).hexdigest()


def read_bundle(path: Path) -> BundleRecord:
    """Read and check the bundle at ``path``.

    Raises:
        UserError: not a bundle, an unfinished or damaged one, of another schema version, or its weights have changed
            or cannot be read.
    """
    check_name(path)
    record = _read_record(path)
    root = record.weights_root(path)
    for source in record.sources.values():
        for location, expected in source.files.items():
            try:
                _check_file(root / location, expected, record)
            except OSError as error:
                raise UserError(
                    f"{root / location}: cannot read it: {error.strerror}. Mend its permissions."
                ) from error
    return record


def _read_record(path: Path) -> BundleRecord:
    if PARTIAL in path.name:
        raise UserError(f"{path}: an unfinished build, not a bundle. Run trt-eagle3 build again.")
    file = path / BUNDLE_FILE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{path}: no bundle here ({BUNDLE_FILE} not found). Make one: trt-eagle3 build") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: unreadable: {error}. Rebuild: trt-eagle3 build") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{file}: bundle schema version {version}, this trt-eagle3 reads {SCHEMA_VERSION}. "
            "Rebuild: trt-eagle3 build --config <its config>"
        )
    try:
        return BundleRecord.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        raise UserError(f"{file}: {where}: {first['msg']}. Rebuild: trt-eagle3 build") from error


def _check_file(file: Path, expected: FileRecord, record: BundleRecord) -> None:
    fix = f"Rebuild: trt-eagle3 build --config <the config of {record.config.name}>"
    if not file.is_file():
        raise UserError(f"{file}: a weight file of this bundle is gone. {fix}")
    size = file.stat().st_size
    if size != expected.size:
        raise UserError(f"{file}: expected {expected.size} bytes, got {size}. {fix}")
    if header_digest(file) != expected.header_sha256:
        raise UserError(f"{file}: its safetensors header is not the one this bundle was built with. {fix}")
