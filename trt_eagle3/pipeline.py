"""build: a checkpoint pair becomes a bundle."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.checkpoint.manifest import DraftManifest, manifest_to_dict
from trt_eagle3.checkpoint.source import resolve_checkpoint
from trt_eagle3.checkpoint.target import TargetSpec, target_to_dict
from trt_eagle3.checkpoint.target_reader import read_target
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.config import BuildConfig
from trt_eagle3.decode.tree import Tree, static_tree
from trt_eagle3.engine.bundle import (
    BUNDLE_FILE,
    SCHEMA_VERSION,
    BundleRecord,
    EngineRecord,
    FileRecord,
    SourceRecord,
    TensorRecord,
    header_digest,
    reference_location,
)
from trt_eagle3.engine.staging import atomic_directory, place_file, write_file
from trt_eagle3.errors import UserError
from trt_eagle3.graph.pair import pair_graphs
from trt_eagle3.multimodal import Processor, copy_processor_files

__all__ = ["STAGES", "BuildReport", "build"]

STAGES = ("checkpoints", "graphs", "weights", "processor", "bundle")
"""What ``build`` goes through, in order; it tells its ``progress`` when each begins."""


@dataclass(frozen=True)
class BuildReport:
    """What was built.

    Attributes:
        path: the bundle. seconds: per stage. num_bytes: of all files in the bundle. placed: how weights got there.
    """

    path: Path
    seconds: Mapping[str, float]
    num_bytes: int
    placed: tuple[str, ...]


def build(
    config: BuildConfig,
    *,
    output: Path | None = None,
    reference_weights: bool = False,
    progress: Callable[[str], object] = str,
) -> BuildReport:
    """Build the bundle ``output / config.name``, all of it or nothing.

    Args:
        output: instead of the config's.
        reference_weights: leave the weights in the checkpoints; the bundle then works on this machine only.
        progress: called with each of ``STAGES`` as it begins.
    Raises:
        UserError: anything wrong with config, checkpoints or the disk.
    """
    clock = _Clock(progress)
    clock.begin("checkpoints")
    tree = static_tree(config.speculation)
    spec = read_target(resolve_checkpoint(config.target.checkpoint, config.target.revision))
    manifest = _read_draft(config, spec)
    if manifest:
        _check_ranks(tree, manifest)
    places = _Places(spec, manifest, reference_weights)
    path = (output or config.output) / config.name
    _check_replaceable(path)
    with atomic_directory(path) as folder:
        clock.begin("graphs")
        for name, model in pair_graphs(spec, manifest, config.engine, places.locate).items():
            write_file(folder / name / "model.onnx", model.SerializeToString())
            write_file(folder / name / "config.json", _graph_config(config, spec, manifest, name))
        clock.begin("weights")
        placed = () if reference_weights else tuple(place_file(f, folder / to) for f, to in places.files.items())
        clock.begin("processor")
        Processor.from_directory(spec.path, spec)  # refuses now what would be refused at every load
        copy_processor_files(spec.path, folder / "processor")
        clock.begin("bundle")
        record = _record(config, spec, manifest, places)
        write_file(folder / BUNDLE_FILE, record.model_dump_json(indent=2).encode())
    num_bytes = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    return BuildReport(path, clock.end(), num_bytes, tuple(dict.fromkeys(placed)))


def _read_draft(config: BuildConfig, spec: TargetSpec) -> DraftManifest | None:
    """The draft's manifest, with the target's head in its tensors where it has none of its own."""
    if config.draft is None:
        return None
    path = resolve_checkpoint(config.draft.checkpoint, config.draft.revision)
    manifest = read_draft(path, spec, config.draft.overrides)
    if manifest.head == "own":
        return manifest
    return dataclasses.replace(manifest, tensors={**manifest.tensors, "lm_head.weight": spec.tensors["lm_head.weight"]})


def _check_replaceable(path: Path) -> None:
    """Only a bundle, whole or damaged, or an empty folder is replaced: nobody else's files are deleted."""
    try:
        ours = any((path / name).is_file() for name in (BUNDLE_FILE, "target/model.onnx"))
        empty = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    except OSError as error:
        raise UserError(f"{path}: cannot write the bundle: {error.strerror}. Name another place.") from error
    if not ours and not empty:
        raise UserError(f"{path}: expected a bundle or nothing there, got something else. Move it, or change the name.")


def _check_ranks(tree: Tree, manifest: DraftManifest) -> None:
    if max(tree.ranks) >= manifest.draft_vocab_size:
        raise UserError(
            f"speculation: the tree takes a token's {max(tree.ranks) + 1} best children, the draft knows "
            f"{manifest.draft_vocab_size} tokens. Lower speculation.topk or the ranks of speculation.tree."
        )


class _Clock:
    """Seconds per stage."""

    def __init__(self, progress: Callable[[str], object]) -> None:
        self._progress = progress
        self._marks: list[tuple[str, float]] = []

    def begin(self, stage: str) -> None:
        self._marks.append((stage, time.perf_counter()))
        self._progress(stage)

    def end(self) -> dict[str, float]:
        ends = [start for _, start in self._marks[1:]] + [time.perf_counter()]
        return {stage: end - start for (stage, start), end in zip(self._marks, ends, strict=True)}


class _Places:
    """Where each weight file goes: under ``weights/<role>/`` of the bundle, or nowhere when it is referenced."""

    def __init__(self, spec: TargetSpec, manifest: DraftManifest | None, reference: bool) -> None:
        self.reference = reference
        roles: dict[str, Iterable[TensorRef]] = {"target": spec.tensors.values()}
        if manifest:
            roles["draft"] = manifest.tensors.values()
        self.files: dict[Path, str] = {}
        self.by_role: dict[str, list[Path]] = {}
        for role, refs in roles.items():
            new = sorted({ref.file for ref in refs} - self.files.keys())
            self.by_role[role] = new
            by_file = {ref.file: ref for ref in refs}
            self.files |= {file: self._location(role, by_file[file]) for file in new}

    def _location(self, role: str, ref: TensorRef) -> str:
        return reference_location(ref) if self.reference else f"weights/{role}/{ref.file.name}"

    def locate(self, ref: TensorRef) -> str:
        """Location of a tensor's file under the weights root."""
        return self.files[ref.file]

    def tensor(self, ref: TensorRef) -> TensorRecord:
        """Record of a tensor that is used outside the graphs."""
        return TensorRecord(
            location=self.locate(ref),
            name=ref.name,
            offset=ref.offset,
            num_bytes=ref.num_bytes,
            dtype=ref.dtype,
            shape=ref.shape,
        )

    def source(self, role: str, path: Path, checkpoint: str, revision: str | None) -> SourceRecord:
        """Record of a checkpoint and its files."""
        files = {
            self.files[f]: FileRecord(size=f.stat().st_size, header_sha256=header_digest(f)) for f in self.by_role[role]
        }
        return SourceRecord(checkpoint=checkpoint, revision=revision, path=str(path), files=files)


def _graph_config(config: BuildConfig, spec: TargetSpec, manifest: DraftManifest | None, name: str) -> bytes:
    """TensorRT-LLM's ``config.json`` of an engine folder."""
    of_draft = manifest is not None and name in {"fuse", "draft"}
    return _json(
        {
            "version": version("trt-eagle3"),
            "pretrained_config": manifest_to_dict(manifest) if manifest and of_draft else target_to_dict(spec),
            "build_config": config.model_dump(mode="json", exclude={"name", "output"}),
        }
    )


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2).encode()


def _record(config: BuildConfig, spec: TargetSpec, manifest: DraftManifest | None, places: _Places) -> BundleRecord:
    sources = {"target": places.source("target", spec.path, config.target.checkpoint, config.target.revision)}
    if manifest and config.draft:
        sources["draft"] = places.source("draft", manifest.path, config.draft.checkpoint, config.draft.revision)
    return BundleRecord(
        schema_version=SCHEMA_VERSION,
        tool_version=version("trt-eagle3"),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        config=config,
        sources=sources,
        weights="reference" if places.reference else "contained",
        target=target_to_dict(spec),
        draft=manifest_to_dict(manifest) if manifest else None,
        engine=EngineRecord(
            backend=config.engine.backend,
            dtype=config.engine.dtype,
            versions={name: version(name) for name in ("onnx", config.engine.backend)},
        ),
        embedding=places.tensor(spec.tensors["embed_tokens.weight"]),
        draft_tensors={name: places.tensor(ref) for name, ref in manifest.tensors.items()} if manifest else {},
    )
