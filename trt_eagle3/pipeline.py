"""build: a checkpoint pair becomes a bundle."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_eagle3.atomic_io import atomic_directory, check_replaceable, create_file, place_file
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.checkpoint.manifest import DraftManifest, manifest_to_dict
from trt_eagle3.checkpoint.source import resolve_checkpoint
from trt_eagle3.checkpoint.target import TargetSpec, target_to_dict
from trt_eagle3.checkpoint.target_reader import read_target
from trt_eagle3.checkpoint.tensor_index import open_index
from trt_eagle3.config import BuildConfig
from trt_eagle3.decode.dynamic_tree import DynamicTree
from trt_eagle3.decode.tree import Tree, configured_tree
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.bundle import (
    BUNDLE_FILE,
    BUNDLE_KIND,
    SCHEMA_VERSION,
    BundleRecord,
    EngineRecord,
    FileRecord,
    SourceRecord,
    check_name,
    reference_location,
)
from trt_eagle3.engine.memory import MemoryNeed, memory_need
from trt_eagle3.engine.output_check import check_apart, check_not_around
from trt_eagle3.engine.weight_locations import (
    TABLE_FILE,
    FileLocations,
    TableLocations,
    WeightLocations,
    table_tensors,
)
from trt_eagle3.errors import UserError, clip
from trt_eagle3.graph.build_graphs import build_graphs
from trt_eagle3.multimodal import Processor, copy_processor_files

if TYPE_CHECKING:  # it imports torch
    from trt_eagle3.engine.trt.bundle import Engines
    from trt_eagle3.engine.trt.profiles import TreeSizes

__all__ = ["STAGES", "BuildReport", "build"]

STAGES = ("checkpoints", "graphs", "weights", "processor", "engines", "bundle")
"""What ``build`` goes through, in order (``engines``: for TensorRT); it tells its ``progress``
when each begins.
"""


@dataclass(frozen=True)
class BuildReport:
    """What was built.

    Attributes:
        path: the bundle. seconds: per stage. num_bytes: of all files in the bundle. placed: how
            weights got there.
        memory: what the largest permitted load takes. engines: what became of the graphs of a
            TensorRT bundle.
    """

    path: Path
    seconds: Mapping[str, float]
    num_bytes: int
    placed: tuple[str, ...]
    memory: MemoryNeed
    engines: Engines | None = None


def build(
    config: BuildConfig,
    *,
    output: Path | None = None,
    config_file: Path | None = None,
    reference_weights: bool = False,
    progress: Callable[[str], object] = str,
    show: Callable[[str], object] = str,
) -> BuildReport:
    """Build the bundle ``output / config.name``, all of it or nothing.

    Args:
        output: instead of the config's. config_file: where the config was read, whose folder is
            never replaced.
        reference_weights: leave the weights in the checkpoints; the bundle then works on this
            machine only.
        progress: called with each of ``STAGES`` as it begins. show: told how far a long stage is.
    Raises:
        UserError: anything wrong with config, checkpoints or the disk.
        EnvironmentMissingError: TensorRT and a GPU are here, and our plugin library is not.
    """
    clock = _Clock(progress)
    clock.begin("checkpoints")
    tree = configured_tree(config.speculation)
    spec = read_target(resolve_checkpoint(config.target.checkpoint, config.target.revision))
    _check_positions(config, spec)
    manifest = _read_draft(config, spec)
    if manifest:
        _check_ranks(tree, manifest)
    _check_headers(spec, manifest)
    path = (output or config.output) / config.name
    check_name(path)
    _check_output(path, spec, manifest, config_file)
    write = _write_engines if config.engine.backend == "tensorrt" else _write_graphs
    with atomic_directory(path, BUNDLE_KIND) as folder:
        written = write(folder, _Job(config, spec, manifest, reference_weights, path, clock, show))
        clock.begin("bundle")
        record = _record(config, spec, manifest, written)
        create_file(folder / BUNDLE_FILE, record.model_dump_json(indent=2).encode())
    num_bytes = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    memory = memory_need(spec, manifest, config.limits, config.engine)
    return BuildReport(
        path, clock.end(), num_bytes, tuple(dict.fromkeys(written.placed)), memory, written.engines
    )


@dataclass(frozen=True)
class _Job:
    """What a backend's part of a build works from; ``path`` is where the bundle will be."""

    config: BuildConfig
    spec: TargetSpec
    manifest: DraftManifest | None
    reference_weights: bool
    path: Path
    clock: _Clock
    show: Callable[[str], object]

    def graph_config(self, folder: Path, name: str) -> None:
        """Write a graph's ``config.json``."""
        create_file(
            folder / name / "config.json",
            _graph_config(self.config, self.spec, self.manifest, name),
        )

    def processor(self, folder: Path) -> None:
        """Copy the processor, which is refused now if it would be refused at every load."""
        self.clock.begin("processor")
        Processor.from_directory(self.spec.path, self.spec)
        copy_processor_files(self.spec.path, folder / "processor")


@dataclass(frozen=True)
class _Written:
    """What a backend put into the bundle."""

    places: WeightLocations
    placed: tuple[str, ...] = ()
    engines: Engines | None = None


def _write_graphs(folder: Path, job: _Job) -> _Written:
    """Graphs that refer to whole weight files."""
    places = FileLocations(job.spec, job.manifest, job.reference_weights)
    job.clock.begin("graphs")
    for name, model in build_graphs(
        job.spec, job.manifest, job.config.engine, places.resolve
    ).items():
        create_file(folder / name / "model.onnx", model.SerializeToString())
        job.graph_config(folder, name)
    job.clock.begin("weights")
    files = () if job.reference_weights else places.locations.items()
    placed = tuple(place_file(f, folder / to) for f, to in files)
    job.processor(folder)
    return _Written(places, placed)


def _write_engines(folder: Path, job: _Job) -> _Written:
    """Engines, which hold their weights, and a file of the tables that are read outside them."""
    from trt_eagle3.engine.trt.bundle import write_engines
    from trt_eagle3.engine.trt.profiles import graph_profiles
    from trt_eagle3.engine.weight_file import write_tables

    config, spec = job.config, job.spec
    if job.reference_weights:
        raise UserError(
            "--weights reference: a TensorRT engine holds its weights. Leave the option out."
        )
    job.clock.begin("graphs")
    models = build_graphs(spec, job.manifest, config.engine, reference_location)
    merge, tree = spec.vision.spatial_merge_size, _tree_sizes(config)
    profiles = {
        name: graph_profiles(name, model, config, tree, merge) for name, model in models.items()
    }
    for name in models:
        job.graph_config(folder, name)
    job.clock.begin("weights")
    dtype = dtype_named(config.engine.dtype)
    write_tables(folder / TABLE_FILE, table_tensors(spec, job.manifest), dtype)
    job.processor(folder)
    job.clock.begin("engines")
    timing_cache = job.path.with_name("timing.cache")
    engines = write_engines(folder, models, profiles, config.engine, timing_cache, job.show)
    return _Written(TableLocations(folder / TABLE_FILE, open_index(folder)), engines=engines)


def _tree_sizes(config: BuildConfig) -> TreeSizes:
    """What the configured tree asks of the engines; a table measured later has no larger one."""
    from trt_eagle3.engine.trt.profiles import TreeSizes

    if config.draft is None:
        return TreeSizes()
    tree, speculation = configured_tree(config.speculation), config.speculation
    return TreeSizes(
        tree.num_nodes,
        speculation.topk if speculation.mode == "dynamic" else 1,
        tree.num_draft_rows,
    )


def _read_draft(config: BuildConfig, spec: TargetSpec) -> DraftManifest | None:
    """The draft's manifest, with the target's head in its tensors where it has none of its own."""
    if config.draft is None:
        return None
    path = resolve_checkpoint(config.draft.checkpoint, config.draft.revision)
    manifest = read_draft(path, spec, config.draft.overrides)
    if manifest.head == "own":
        return manifest
    return dataclasses.replace(
        manifest, tensors={**manifest.tensors, "lm_head.weight": spec.tensors["lm_head.weight"]}
    )


def _check_output(
    path: Path, spec: TargetSpec, manifest: DraftManifest | None, config_file: Path | None
) -> None:
    """Refuse a place where anything but an older bundle would be replaced."""
    folders = [spec.path, *([manifest.path] if manifest else [])]
    check_apart(path, folders, "the checkpoint")
    refs = [*spec.tensors.values(), *(manifest.tensors.values() if manifest else ())]
    check_not_around(path, {ref.file for ref in refs}, "the weight file")
    if config_file is not None:
        check_not_around(path, [config_file.absolute().parent], "the config's folder")
    check_replaceable(path, BUNDLE_KIND)


def _check_headers(spec: TargetSpec, manifest: DraftManifest | None) -> None:
    """Refuse weight files that the safetensors library refuses: others than this program read them
    too.

    Raises:
        UserError: naming the file and the library's reason.
    """
    from safetensors import SafetensorError, safe_open

    refs = [*spec.tensors.values(), *(manifest.tensors.values() if manifest else ())]
    for file in sorted({ref.file for ref in refs}):
        try:
            with safe_open(file, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file}: not a sound safetensors file: {clip(error)}. Download it again."
            ) from error


def _check_positions(config: BuildConfig, spec: TargetSpec) -> None:
    length, trained = config.limits.max_seq_len, spec.text.max_position_embeddings
    if length > trained:
        raise UserError(
            f"limits.max_seq_len: {length}, the target was made for {trained} positions "
            f"(max_position_embeddings of {spec.path / 'config.json'}). Lower it."
        )


def _check_ranks(tree: Tree | DynamicTree, manifest: DraftManifest) -> None:
    children = max(tree.ranks) + 1 if isinstance(tree, Tree) else tree.topk
    if children > manifest.draft_vocab_size:
        raise UserError(
            f"speculation: the tree takes a token's {children} best children, the draft knows "
            f"{manifest.draft_vocab_size} tokens. Lower speculation.topk or the ranks of "
            "speculation.tree."
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


def _graph_config(
    config: BuildConfig, spec: TargetSpec, manifest: DraftManifest | None, name: str
) -> bytes:
    """TensorRT-LLM's ``config.json`` of an engine folder."""
    of_draft = manifest is not None and name in {"fuse", "draft"}
    return _json(
        {
            "version": version("trt-eagle3"),
            "pretrained_config": manifest_to_dict(manifest)
            if manifest and of_draft
            else target_to_dict(spec),
            "build_config": config.model_dump(mode="json", exclude={"name", "output"}),
        }
    )


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2).encode()


def _record(
    config: BuildConfig, spec: TargetSpec, manifest: DraftManifest | None, written: _Written
) -> BundleRecord:
    places = written.places
    sources = {
        "target": _source(
            spec.path, config.target.checkpoint, config.target.revision, places.files("target")
        )
    }
    if manifest and config.draft:
        draft = config.draft
        sources["draft"] = _source(
            manifest.path, draft.checkpoint, draft.revision, places.files("draft")
        )
    return BundleRecord(
        schema_version=SCHEMA_VERSION,
        tool_version=version("trt-eagle3"),
        created_at=datetime.now(UTC).isoformat(timespec="microseconds"),
        config=config,
        sources=sources,
        weights=places.kind,
        target=target_to_dict(spec),
        draft=manifest_to_dict(manifest) if manifest else None,
        engine=_engine_record(config, written.engines),
        embedding=places.token_table(),
        draft_tensors=places.draft_tensors(),
    )


def _source(
    path: Path, checkpoint: str, revision: str | None, files: Mapping[str, FileRecord]
) -> SourceRecord:
    return SourceRecord(
        checkpoint=checkpoint, revision=revision, path=str(path.absolute()), files=files
    )


def _engine_record(config: BuildConfig, engines: Engines | None) -> EngineRecord:
    """Versions and machine that the graphs were made with."""
    backend, dtype = config.engine.backend, config.engine.dtype
    versions = {"onnx": version("onnx")}
    if engines is None:
        return EngineRecord(
            backend=backend, dtype=dtype, versions=versions | {backend: version(backend)}
        )
    from trt_eagle3.engine.trt.versions import gpu_arch, tensorrt

    if engines.missing is not None:
        return EngineRecord(backend=backend, dtype=dtype, versions=versions)
    versions[backend] = tensorrt().__version__
    return EngineRecord(backend=backend, dtype=dtype, versions=versions, gpu_arch=gpu_arch())
