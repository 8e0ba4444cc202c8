"""Build a bundle from a checkpoint pair."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from trt_eagle3.atomic_io import atomic_directory, check_replaceable, create_file
from trt_eagle3.backend_support import SUPPORT
from trt_eagle3.calibration.prompts import CalibrationPrompts, read_prompts
from trt_eagle3.calibration.reckoning import calibration_device, reckon
from trt_eagle3.calibration.run import calibrate
from trt_eagle3.checkpoint.header_check import check_headers
from trt_eagle3.checkpoint.kv_scales import KVScales
from trt_eagle3.checkpoint.manifest import DraftManifest, manifest_to_dict
from trt_eagle3.checkpoint.source import resolve_checkpoint
from trt_eagle3.checkpoint.target import TargetCheckpoint, target_to_dict
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.config import (
    BuildConfig,
    DraftConfig,
    EngineConfig,
    LimitsConfig,
    SpeculationConfig,
)
from trt_eagle3.decode.speculation.dynamic_tree import DynamicTree
from trt_eagle3.decode.speculation.tree import Tree, configured_tree
from trt_eagle3.drafts.registry import find_draft, kind_of
from trt_eagle3.engine.builder.calibration import Calibration
from trt_eagle3.engine.builder.job import BuildJob, Engines, TreeSizes, Written
from trt_eagle3.engine.builder.packed_savings import packed_savings
from trt_eagle3.engine.builder.weight_quantiser import (
    check_quantisable,
    made_location,
    quantise_target,
)
from trt_eagle3.engine.bundle.advice import setting_warnings
from trt_eagle3.engine.bundle.output_check import check_apart, check_not_around
from trt_eagle3.engine.bundle.read import BUNDLE_KIND, check_name
from trt_eagle3.engine.bundle.record import (
    BUNDLE_FILE,
    SCHEMA_VERSION,
    BundleRecord,
    FileRecord,
    SourceRecord,
)
from trt_eagle3.engine.runtime.backend import backend_named
from trt_eagle3.engine.runtime.memory import MemoryNeed, memory_need
from trt_eagle3.engine.runtime.requirement import missing_here
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.families.registry import family_of, read_target
from trt_eagle3.graph.ops.gated_delta import TREE_ROWS
from trt_eagle3.multimodal import copy_processor_files
from trt_eagle3.multimodal.end_tokens import end_token_warnings
from trt_eagle3.prompts.kept import keep_questions
from trt_eagle3.prompts.prompt_file import read_questions
from trt_eagle3.sharding import rank_spec

__all__ = ["STAGES", "BuildReport", "build"]

STAGES = (
    "checkpoints",
    "processor",
    "calibration",
    "quantisation",
    "graphs",
    "weights",
    "engines",
    "bundle",
)
"""Stages of ``build``, in order. ``progress`` is called as each begins.

``calibration`` needs a file of prompts, ``quantisation`` needs ``engine.weights``, ``engines``
needs a backend that compiles.
"""


@dataclass(frozen=True)
class BuildReport:
    """The result of a build.

    Attributes:
        path: the bundle. seconds: per stage. num_bytes: size of all files in the bundle. placed:
            how the weights were placed.
        memory: memory of the largest permitted load. engines: the engines that the backend
            compiled, or the reason why it built none. calibrated_on: number of prompts, as text;
            empty without a calibration.
        warnings: valid but probably unintended settings, and what this machine lacks to run it.
        replaced: an older bundle was there.
        probe: the arguments of ``probe`` for its draft; empty without a draft.
        lacking: what this machine lacks to run the bundle; None if nothing, or if its engines are
            not built.
    """

    path: Path
    seconds: Mapping[str, float]
    num_bytes: int
    placed: tuple[str, ...]
    memory: MemoryNeed
    engines: Engines | None = None
    calibrated_on: str = ""
    warnings: tuple[str, ...] = ()
    replaced: bool = False
    probe: tuple[str, ...] = ()
    lacking: str | None = None


def build(
    config: BuildConfig,
    *,
    output: Path | None = None,
    config_file: Path | None = None,
    reference_weights: bool = False,
    calibration: Path | None = None,
    progress: Callable[[str], object] = str,
    show: Callable[[str], object] = str,
    announce: Callable[[str], object] = str,
) -> BuildReport:
    """Build the bundle ``output / config.name``, all of it or nothing.

    Args:
        output: replaces the config's. config_file: the file of the config, whose folder is never
            replaced.
        reference_weights: leave the weights in the checkpoints; the bundle then works on this
            machine only.
        calibration: a file of prompts (``prompts/prompt_file.py``) to calibrate INT4 weights with.
        progress: called with each of ``STAGES`` as it begins. show: called with the progress of a
            long stage.
        announce: called with the expected cost of a calibration before it begins.
    Raises:
        UserError: an error in the config, the checkpoints or the disk.
        EnvironmentMissingError: TensorRT and a GPU are present, but our plugin library is not.
    """
    clock = _Clock(progress)
    clock.begin("checkpoints")
    engine = config.engine
    with _tried(config_file, "target.checkpoint", config.target.checkpoint):
        path = resolve_checkpoint(config.target.checkpoint, config.target.revision)
    spec = read_target(path)
    _check_positions(config.limits, spec)
    with _tried(config_file, "draft.checkpoint", config.draft.checkpoint if config.draft else None):
        manifest = _read_draft(config.draft, spec)
    config = _with_chain(config, manifest)
    tree = _checked_tree(config.speculation, spec, manifest)
    _check_weights(engine, spec, reference_weights)
    check_headers(ref.file for ref in _tensors(spec, manifest))
    if config.prompts:
        with _tried(config_file, "prompts", str(config.prompts)):
            read_questions(config.prompts)
    path = (output or config.output) / config.name
    check_name(path)
    _check_output(path, spec, manifest, config_file)
    sizes = _tree_sizes(tree, config.speculation.topk) if config.draft else TreeSizes()
    prompts = _calibration_prompts(engine, spec, calibration, config.limits.max_seq_len)
    if prompts is None:  # else the calibration's scales replace the checkpoint's
        _kv_scales(engine, spec)  # raises here, before any work
    replaced = (path / BUNDLE_FILE).exists()
    with atomic_directory(path, BUNDLE_KIND) as folder:
        clock.begin("processor")
        _copy_processor(spec, folder / "processor")
        if config.prompts:
            keep_questions(config.prompts, folder)
        found = None
        with TemporaryDirectory(dir=folder) as scratch:
            if prompts is not None:
                clock.begin("calibration")
                device, int4 = calibration_device(engine.device), engine.weights == "int4"
                announce(f"calibration: {prompts}; {reckon(spec, prompts, device, weights=int4)}")
                found = _calibrated(engine, spec, prompts, device, Path(scratch), show)
                spec = dataclasses.replace(spec, kv_scales=found.kv_scales())
            if engine.weights:
                clock.begin("quantisation")
                spec, manifest = _quantised(spec, manifest, engine, folder, show, found)
        job = BuildJob(
            engine,
            config.limits,
            config.model_dump(mode="json", exclude={"name", "output"}),
            spec,
            manifest,
            path,
            sizes,
            reference_weights,
            clock.begin,
            show,
        )
        written = backend_named(engine.backend).write(folder, job)
        clock.begin("bundle")
        record = _record(config, spec, manifest, written)
        create_file(folder / BUNDLE_FILE, record.model_dump_json(indent=2).encode())
    num_bytes = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    memory = memory_need(
        rank_spec(spec, engine.tensor_parallel),
        manifest,
        config.limits,
        engine,
        tree.num_nodes if manifest else 1,
        record.packed_savings // engine.tensor_parallel,
    )
    lacking = None if written.engines and written.engines.missing else missing_here(engine)
    return BuildReport(
        path,
        clock.end(),
        num_bytes,
        tuple(dict.fromkeys(written.placed)),
        memory,
        written.engines,
        _calibrated_on(prompts, found),
        (
            *setting_warnings(config.limits, spec),
            *end_token_warnings(spec.path, spec.eos_token_ids),
            *_lacking_warnings(engine, lacking),
        ),
        replaced,
        _probe_arguments(config, path),
        lacking,
    )


def _probe_arguments(config: BuildConfig, path: Path) -> tuple[str, ...]:
    """Return the bundle, or its checkpoints if its backend cannot return inner tensors."""
    draft = config.draft
    if draft is None:
        return ()
    if SUPPORT[config.engine.backend].compiles:
        return config.target.checkpoint, draft.checkpoint
    return (str(path),)


@contextlib.contextmanager
def _tried(config_file: Path | None, key: str, value: str | None) -> Iterator[None]:
    """Add to an error of the block the ``key`` of a missing path.

    Of a relative path in a config file, add also where it was looked for.
    """
    path = Path(value or "/").expanduser()
    if path.exists() or value == "mtp":
        yield
        return
    try:
        yield
    except (UserError, EnvironmentMissingError) as error:
        if config_file is None or path.is_absolute():
            raise type(error)(f"{key}: {error}") from error
        folders = dict.fromkeys((Path.cwd(), config_file.absolute().parent))
        places = " and ".join(str(folder / path) for folder in folders)
        raise type(error)(f"{key}: {str(error).rstrip('.')}. Tried {places}.") from error


def _lacking_warnings(engine: EngineConfig, lacking: str | None) -> list[str]:
    """Return a warning if this machine cannot run the bundle."""
    if lacking is None:
        return []
    name = backend_named(engine.backend).requirement(engine)
    return [f"this machine cannot run the bundle: {name} needs {lacking}"]


def _calibrated_on(prompts: CalibrationPrompts | None, found: Calibration | None) -> str:
    """Describe the calibration for the report; empty without a calibration."""
    if found is None:
        return ""
    few = found.experts_without_data
    made = f"; {few} experts with too few rows are quantised without data" if few else ""
    return f"{prompts}{made}"


def _tree_sizes(tree: Tree | DynamicTree, topk: int) -> TreeSizes:
    """Return the tree sizes of the engines; a tree table measured later has no larger tree."""
    width = topk if isinstance(tree, DynamicTree) else 1
    return TreeSizes(tree.num_nodes, width, tree.num_draft_rows)


def _copy_processor(spec: TargetCheckpoint, folder: Path) -> None:
    """Copy the processor's files, unless every load would refuse them."""
    family_of(spec).processor(spec.path, spec)
    copy_processor_files(spec.path, folder)


def _tensors(spec: TargetCheckpoint, manifest: DraftManifest | None) -> list[TensorRef]:
    """List the tensors of target and draft as stored on disk."""
    refs = [*spec.tensors.values(), *(manifest.tensors.values() if manifest else ())]
    return [stored for ref in refs for stored in ref.stored]


def _read_draft(draft: DraftConfig | None, spec: TargetCheckpoint) -> DraftManifest | None:
    if draft is None:
        return None
    return find_draft(draft.checkpoint, spec, draft.overrides, draft.revision)


def _check_weights(engine: EngineConfig, spec: TargetCheckpoint, reference: bool) -> None:
    """Refuse weights that cannot be quantised."""
    if engine.weights is None:
        return
    check_quantisable(spec, engine.weights)
    if reference:
        raise UserError(
            f"engine.weights: {engine.weights} makes weights that no checkpoint has. Build "
            "with --weights contained."
        )


def _calibration_prompts(
    engine: EngineConfig, spec: TargetCheckpoint, file: Path | None, max_seq_len: int
) -> CalibrationPrompts | None:
    """Read the prompts of ``--calibration``, and check them before any computation."""
    if file is None:
        return None
    if engine.weights != "int4" and engine.kv_dtype != "fp8":
        made = engine.weights or "none"
        raise UserError(
            f"--calibration {file}: only for INT4 weights and an FP8 KV cache, but "
            f"engine.weights is {made}. Set engine.weights: int4 or engine.kv_dtype: fp8, or leave "
            "it out."
        )
    return read_prompts(file, spec, max_seq_len)


def _calibrated(
    engine: EngineConfig,
    spec: TargetCheckpoint,
    prompts: CalibrationPrompts,
    device: str,
    scratch: Path,
    show: Callable[[str], object],
) -> Calibration:
    weights = engine.weights == "int4"
    head = weights and engine.quantise_head
    return calibrate(spec, prompts, device, scratch, show, weights=weights, head=head)


def _quantised(
    spec: TargetCheckpoint,
    manifest: DraftManifest | None,
    engine: EngineConfig,
    folder: Path,
    show: Callable[[str], object],
    calibration: Calibration | None,
) -> tuple[TargetCheckpoint, DraftManifest | None]:
    """Quantise the target into the bundle, and repoint a draft that shares its head."""
    assert engine.weights is not None
    file = folder / made_location(engine.weights)
    made = quantise_target(
        spec, engine.weights, file, show, head=engine.quantise_head, calibration=calibration
    )
    if manifest is None or manifest.head == "own":
        return made, manifest
    tensors = {**manifest.tensors, "lm_head.weight": made.tensors["lm_head.weight"]}
    return made, dataclasses.replace(manifest, tensors=tensors)


def _check_output(
    path: Path, spec: TargetCheckpoint, manifest: DraftManifest | None, config_file: Path | None
) -> None:
    """Refuse an output path where anything but an older bundle would be replaced."""
    folders = [spec.path, *([manifest.path] if manifest else [])]
    check_apart(path, folders, "the checkpoint")
    check_not_around(path, {ref.file for ref in _tensors(spec, manifest)}, "the weight file")
    if config_file is not None:
        check_not_around(path, [config_file.absolute().parent], "the config's folder")
    check_replaceable(path, BUNDLE_KIND)


def _check_positions(limits: LimitsConfig, spec: TargetCheckpoint) -> None:
    length, trained = limits.max_seq_len, spec.max_position_embeddings
    if length > trained:
        raise UserError(
            f"limits.max_seq_len: {length}, the target has {trained} positions "
            f"(max_position_embeddings of {spec.path / 'config.json'}). Lower it."
        )


def _with_chain(config: BuildConfig, manifest: DraftManifest | None) -> BuildConfig:
    """Return ``config``, its chain as long as a draft that proposes whole chains can make it."""
    most = kind_of(manifest).chain_steps(manifest) if manifest else None
    if manifest is None or most is None:
        return config
    speculation = config.speculation
    if speculation.mode != "chain":
        raise UserError(
            f"speculation.mode: {speculation.mode}; {manifest.path} drafts chains only. "
            "Set speculation.mode: chain."
        )
    if not speculation.model_fields_set & {"steps", "num_draft_tokens"}:
        chain = speculation.model_copy(update={"steps": most})
        return config.model_copy(update={"speculation": chain})
    if speculation.steps > most:
        raise UserError(
            f"speculation.steps: {speculation.steps}; a block of {manifest.path} drafts at most "
            f"{most} tokens. Lower it, or leave it out."
        )
    return config


def _checked_tree(
    speculation: SpeculationConfig, spec: TargetCheckpoint, manifest: DraftManifest | None
) -> Tree | DynamicTree:
    """Return the configured tree; raises if target or draft cannot run it."""
    tree = configured_tree(speculation)
    if manifest:
        _check_ranks(tree, manifest)
        _check_tree_rows(tree, spec)
    return tree


def _check_ranks(tree: Tree | DynamicTree, manifest: DraftManifest) -> None:
    children = max(tree.ranks) + 1 if isinstance(tree, Tree) else tree.topk
    if children > manifest.draft_vocab_size:
        raise UserError(
            f"speculation: the tree takes a token's {children} best children, the draft's "
            f"vocabulary has {manifest.draft_vocab_size} tokens. Lower speculation.topk or the "
            "ranks of speculation.tree."
        )


def _check_tree_rows(tree: Tree | DynamicTree, spec: TargetCheckpoint) -> None:
    """Refuse a tree so large that linear-attention layers would treat it as a run of tokens."""
    if spec.recurrent_layers and tree.num_nodes > TREE_ROWS:
        raise UserError(
            f"speculation: a tree of {tree.num_nodes} tokens; the linear-attention layers of "
            f"{spec.path} take {TREE_ROWS} at most. Lower speculation.num_draft_tokens."
        )


class _Clock:
    """Measure the seconds of each stage."""

    def __init__(self, progress: Callable[[str], object]) -> None:
        self._progress = progress
        self._marks: list[tuple[str, float]] = []

    def begin(self, stage: str) -> None:
        self._marks.append((stage, time.perf_counter()))
        self._progress(stage)

    def end(self) -> dict[str, float]:
        ends = [start for _, start in self._marks[1:]] + [time.perf_counter()]
        return {stage: end - start for (stage, start), end in zip(self._marks, ends, strict=True)}


def _record(
    config: BuildConfig, spec: TargetCheckpoint, manifest: DraftManifest | None, written: Written
) -> BundleRecord:
    locations = written.locations
    sources = {
        "target": _source(
            spec.path, config.target.checkpoint, config.target.revision, locations.files("target")
        )
    }
    if manifest and config.draft:
        draft = config.draft
        sources["draft"] = _source(
            manifest.path, draft.checkpoint, draft.revision, locations.files("draft")
        )
    return BundleRecord(
        schema_version=SCHEMA_VERSION,
        tool_version=version("trt-eagle3"),
        created_at=datetime.now(UTC).isoformat(timespec="microseconds"),
        config=config,
        sources=sources,
        weights=locations.kind,
        target=target_to_dict(spec),
        draft=manifest_to_dict(manifest) if manifest else None,
        engine=written.record,
        embedding=locations.token_table(),
        draft_tensors=locations.draft_tensors(),
        kv_scales=_kv_scales(config.engine, spec),
        packed_savings=packed_savings(spec, config.engine),
    )


def _kv_scales(engine: EngineConfig, spec: TargetCheckpoint) -> dict[int, KVScales]:
    """Return the KV scales of every layer for an FP8 cache; empty otherwise."""
    if engine.kv_dtype != "fp8":
        return {}
    return {k: spec.kv_scales.get(k, KVScales()) for k, _ in spec.attention_layers}


def _source(
    path: Path, checkpoint: str, revision: str | None, files: Mapping[str, FileRecord]
) -> SourceRecord:
    return SourceRecord(
        checkpoint=checkpoint, revision=revision, path=str(path.absolute()), files=files
    )
