"""Locations of a bundle's weights: next to its graphs, in their checkpoints, or, for engines, in a
separate table file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, Protocol

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.drafts.registry import kind_of
from trt_eagle3.engine.bundle.check import header_digest
from trt_eagle3.engine.bundle.record import FileRecord, TensorRecord, reference_location

__all__ = [
    "TABLE_FILE",
    "FileLocations",
    "TableLocations",
    "WeightLocations",
    "table_tensors",
]

TABLE_FILE = "embedding.safetensors"
"""The file of tensors that a TensorRT bundle reads outside its engines."""
_TOKEN_TABLE = "embed_tokens.weight"
_DRAFT = "draft."  # prefix of the draft's tensors in that file


class WeightLocations(Protocol):
    """Weight locations that ``bundle.json`` records."""

    @property
    def kind(self) -> Literal["contained", "reference"]:
        """``BundleRecord.weights``."""
        ...

    def files(self, role: str) -> Mapping[str, FileRecord]:
        """Return the files of ``target`` or ``draft``, by location under the weights root."""
        ...

    def token_table(self) -> TensorRecord:
        """Return the target's token table."""
        ...

    def draft_tensors(self) -> Mapping[str, TensorRecord]:
        """Return the draft's tensors that can be read outside the graphs."""
        ...


class FileLocations:
    """Whole weight files, under ``weights/<role>/`` of the bundle, or in their checkpoints if
    ``reference``.
    """

    def __init__(
        self, spec: TargetCheckpoint, manifest: DraftManifest | None, reference: bool
    ) -> None:
        self._reference = reference
        self._spec = spec
        self._manifest = manifest
        roles: dict[str, Iterable[TensorRef]] = {"target": spec.tensors.values()}
        if manifest:
            roles["draft"] = manifest.tensors.values()
        self.locations: dict[Path, str] = {}
        self._by_role: dict[str, list[Path]] = {}
        for role, weights in roles.items():
            refs = [stored for ref in weights for stored in ref.stored]
            new = sorted({ref.file for ref in refs} - self.locations.keys())
            self._by_role[role] = new
            by_file = {ref.file: ref for ref in refs}
            self.locations |= {file: self._location(role, by_file[file]) for file in new}

    def _location(self, role: str, ref: TensorRef) -> str:
        return reference_location(ref) if self._reference else f"weights/{role}/{ref.file.name}"

    def resolve(self, ref: TensorRef) -> str:
        """Return the location of a tensor's file under the weights root."""
        return self.locations[ref.file]

    @property
    def kind(self) -> Literal["contained", "reference"]:
        return "reference" if self._reference else "contained"

    def files(self, role: str) -> Mapping[str, FileRecord]:
        return {self.locations[f]: _file_record(f) for f in self._by_role[role]}

    def token_table(self) -> TensorRecord:
        return self._record(self._spec.tensors[_TOKEN_TABLE])

    def draft_tensors(self) -> Mapping[str, TensorRecord]:
        return (
            {
                name: self._record(ref)
                for name, ref in self._manifest.tensors.items()
                if type(ref) is TensorRef  # quantised tensors and experts are never read by row
            }
            if self._manifest
            else {}
        )

    def _record(self, ref: TensorRef) -> TensorRecord:
        return _tensor_record(ref, self.resolve(ref))


class TableLocations:
    """Only the file ``TABLE_FILE``: the engines hold all other weights."""

    kind: Literal["contained", "reference"] = "contained"

    def __init__(self, file: Path, index: Mapping[str, TensorRef]) -> None:
        """``index``: the tensors of ``file``, named as in ``table_tensors``."""
        self._file = file
        self._index = index

    def files(self, role: str) -> Mapping[str, FileRecord]:
        return {TABLE_FILE: _file_record(self._file)} if role == "target" else {}

    def token_table(self) -> TensorRecord:
        return _tensor_record(self._index[_TOKEN_TABLE], TABLE_FILE)

    def draft_tensors(self) -> Mapping[str, TensorRecord]:
        return {
            name.removeprefix(_DRAFT): _tensor_record(ref, TABLE_FILE)
            for name, ref in self._index.items()
            if name.startswith(_DRAFT)
        }


def table_tensors(spec: TargetCheckpoint, manifest: DraftManifest | None) -> dict[str, TensorRef]:
    """Return the contents of ``TABLE_FILE``: the target's token table, and the tensors of the draft
    that decoding reads outside its graphs, if it has them.
    """
    tables = {_TOKEN_TABLE: spec.tensors[_TOKEN_TABLE]}
    if manifest is None:
        return tables
    own = (_TOKEN_TABLE,) if manifest.embedding == "own" else ()
    for name in ("d2t", *own, *kind_of(manifest).tables(manifest)):
        if name in manifest.tensors:
            tables[f"{_DRAFT}{name}"] = manifest.tensors[name]
    return tables


def _file_record(file: Path) -> FileRecord:
    return FileRecord(size=file.stat().st_size, header_sha256=header_digest(file))


def _tensor_record(ref: TensorRef, location: str) -> TensorRecord:
    return TensorRecord(
        location=location,
        name=ref.name,
        offset=ref.offset,
        num_bytes=ref.num_bytes,
        dtype=ref.dtype,
        shape=ref.shape,
    )
