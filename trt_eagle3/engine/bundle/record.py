"""The schema of ``bundle.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trt_eagle3.checkpoint.kv_scales import KVScales
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.config import BuildConfig
from trt_eagle3.drafts.registry import kind_named

__all__ = [
    "BUNDLE_FILE",
    "REFERENCE_ROOT",
    "SCHEMA_VERSION",
    "BundleRecord",
    "EngineRecord",
    "FileRecord",
    "SourceRecord",
    "TensorRecord",
    "reference_location",
]

SCHEMA_VERSION = 3
BUNDLE_FILE = "bundle.json"
REFERENCE_ROOT = Path("/")
"""The weights root of graphs whose weights stay in their checkpoints."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(_Record):
    """A weight file: size in bytes, and the sha256 of its safetensors header."""

    size: int
    header_sha256: str


class SourceRecord(_Record):
    """The origin of a checkpoint.

    ``files``: location under the weights root -> record of that file.
    """

    checkpoint: str
    revision: str | None
    path: str
    files: Mapping[str, FileRecord]


class TensorRecord(_Record):
    """A tensor that is read outside the graphs; its location is under the weights root."""

    location: str
    name: str
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]

    def ref(self, weights_root: Path) -> TensorRef:
        """Return the tensor's position on disk."""
        return TensorRef(
            self.name,
            weights_root / self.location,
            self.offset,
            self.num_bytes,
            self.dtype,
            self.shape,
        )


class EngineRecord(_Record):
    """The backend, types and versions that the graphs were made for."""

    backend: str
    dtype: str
    versions: Mapping[str, str]
    gpu_arch: str | None = None


class BundleRecord(_Record):
    """``bundle.json``.

    Attributes:
        weights: ``contained`` = under the bundle; ``reference`` = in the original checkpoints.
        target, draft: the resolved specs (``checkpoint.target.target_to_dict`` and
            ``manifest_to_dict``).
        kv_scales: layer -> scales of its FP8 KV cache; empty if the cache is not FP8.
        packed_savings: bytes that packed weights save in memory, compared with the compute type.
        embedding: the shared token table.
        draft_tensors: every tensor of the draft by canonical name
            (``checkpoint.manifest.DraftManifest.tensors``).
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
    kv_scales: Mapping[int, KVScales] = {}
    packed_savings: Annotated[int, Field(ge=0)] = 0

    @property
    def graphs(self) -> tuple[str, ...]:
        """The graphs of the bundle, each in a folder of its name."""
        vision = ("vision",) if self.target.get("vision") else ()
        kind = None if self.draft is None else kind_named(str(self.draft.get("kind", "eagle3")))
        return ("target", *vision, *(kind.graph_names if kind else ()))

    def weight_files(self) -> dict[str, FileRecord]:
        """Return every weight file, by location under the weights root."""
        return {
            location: file
            for source in self.sources.values()
            for location, file in source.files.items()
        }

    def weights_root(self, bundle: Path) -> Path:
        """Return the folder that weight locations are relative to."""
        return bundle if self.weights == "contained" else REFERENCE_ROOT


def reference_location(ref: TensorRef) -> str:
    """Return the location of a tensor's own file under ``REFERENCE_ROOT``. Links are resolved,
    because sessions refuse them.
    """
    return str(ref.file.resolve().relative_to(REFERENCE_ROOT))
