"""The TensorRT part of a bundle: engines if they can be built here, else the files for building
them later.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path

import onnx

from trt_eagle3.atomic_io import write_file
from trt_eagle3.checkpoint.tensor_index import open_index
from trt_eagle3.config import EngineConfig
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.builder.job import BuildJob, BuiltEngine, Engines, Written
from trt_eagle3.engine.builder.weight_file import write_tables, write_weights
from trt_eagle3.engine.bundle.read import BUILD_SCRIPT
from trt_eagle3.engine.bundle.record import REFERENCE_ROOT, EngineRecord, reference_location
from trt_eagle3.engine.bundle.weight_locations import TABLE_FILE, TableLocations, table_tensors
from trt_eagle3.engine.trt.build import build_engine
from trt_eagle3.engine.trt.dialects.registry import (
    PACKAGES,
    find_dialect,
    package_of,
)
from trt_eagle3.engine.trt.folder import ENGINE_FILE, ONNX_FOLDER, describe_engine
from trt_eagle3.engine.trt.host_memory import tell_need
from trt_eagle3.engine.trt.inspection import CopiesCacheError
from trt_eagle3.engine.trt.packed_file import PACKED_FILE
from trt_eagle3.engine.trt.packed_products import keep_packed_products
from trt_eagle3.engine.trt.packed_weights import keep_packed
from trt_eagle3.engine.trt.plugins import load_plugins
from trt_eagle3.engine.trt.profiles import Profile, graph_profiles
from trt_eagle3.engine.trt.script import build_script
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.families.family import SizeRange
from trt_eagle3.families.registry import tower_of
from trt_eagle3.graph.states import encode_states, read_states
from trt_eagle3.graph.trt_export import (
    WEIGHTS_FILE,
    TrtExport,
    check_plugins,
    trt_export,
    with_prefetch_safe,
)
from trt_eagle3.graph.word_states import with_word_states
from trt_eagle3.tensorrt_config import RUNTIMES, chips_without_fp8

__all__ = ["missing_for_engines", "uses_linear", "write_bundle", "write_engines"]


def write_bundle(folder: Path, job: BuildJob) -> Written:
    """Write the engines, which hold their weights, and a file with the tables that are read outside
    them, into the bundle at ``folder``.

    Raises:
        UserError: weights are requested by reference, the TensorRT lacks a type, a plugin does not
            support a graph, or TensorRT cannot build. EnvironmentMissingError: there is a TensorRT
            and a GPU, but no plugin library.
    """
    if job.reference_weights:
        raise UserError(
            "--weights reference: a TensorRT engine holds its weights. Leave the option out."
        )
    missing_for_engines(job.engine)  # refuses a type that the TensorRT lacks
    graphs = job.make_graphs(folder, reference_location)
    for graph in graphs.values():
        check_plugins(graph)
    models = {name: with_word_states(model) for name, model in graphs.items()}
    images = _image_sizes(job)
    profiles = {
        name: graph_profiles(name, model, job.engine, job.limits, job.tree, images)
        for name, model in models.items()
    }
    job.begin("weights")
    dtype = dtype_named(job.engine.dtype)
    write_tables(folder / TABLE_FILE, table_tensors(job.spec, job.manifest), dtype)
    job.begin("engines")
    timing_cache = job.path.with_name("timing.cache")
    engines = write_engines(folder, models, profiles, job.engine, timing_cache, job.show)
    locations = TableLocations(folder / TABLE_FILE, open_index(folder))
    return Written(locations, _record(job.engine, engines), engines=engines)


def _image_sizes(job: BuildJob) -> Mapping[str, SizeRange]:
    vision, most = job.spec.vision, job.limits.max_visual_tokens
    return tower_of(job.spec).ranges(vision, most) if vision else {}


def _record(config: EngineConfig, engines: Engines) -> EngineRecord:
    record = EngineRecord(
        backend=config.backend, dtype=config.dtype, versions={"onnx": version("onnx")}
    )
    if engines.missing is not None:
        return record
    dialect = find_dialect(config.tensorrt)
    built = {
        "versions": {**record.versions, dialect.package: dialect.version},
        "gpu_arch": dialect.build_arch(config.tensorrt),
    }
    return record.model_copy(update=built)


def missing_for_engines(config: EngineConfig) -> str | None:
    """Return why engines cannot be built on this machine; None if they can.

    Raises:
        UserError: the TensorRT lacks a type. EnvironmentMissingError: there is a TensorRT and a
            GPU, but no plugin library; or a package that has no trtexec is not installed.
    """
    try:
        dialect = find_dialect(config.tensorrt)
    except EnvironmentMissingError as error:
        if not PACKAGES[package_of(config.tensorrt)].has_trtexec:
            raise
        return str(error)
    if dialect.build_arch(config.tensorrt) is None:
        return "torch sees no CUDA device on this machine."
    dialect.check_dtype(config.dtype)
    load_plugins(config.tensorrt)
    return None


def uses_linear(config: EngineConfig) -> bool:
    """Return whether our plugin computes products with 16-bit weights (``tensorrt.linear``)."""
    if config.dtype == "float32":
        return False
    if config.tensorrt.linear != "auto":
        return config.tensorrt.linear == "plugin"
    try:
        return find_dialect(config.tensorrt).linear_by_plugin
    except EnvironmentMissingError:
        return False  # trtexec builds it, which needs TensorRT 10 or later


def write_engines(
    folder: Path,
    models: Mapping[str, onnx.ModelProto],
    profiles: Mapping[str, Sequence[Profile]],
    config: EngineConfig,
    timing_cache: Path,
    show: Callable[[str], object] = str,
) -> Engines:
    """Build the engines of ``models`` into the bundle at ``folder``, one after the other.

    Weights are written in the engine's type next to each graph. They are deleted once the engine is
    built, so that the disk holds the weights of one graph at a time. If engines cannot be built
    here, the weights stay, with a script that builds.

    Args:
        models: ``graph.pair.build_graphs`` over checkpoints at ``REFERENCE_ROOT``.
    """
    missing, linear = missing_for_engines(config), uses_linear(config)
    built: dict[str, BuiltEngine] = {}
    for name, model in models.items():
        onnx_folder = folder / name / ONNX_FOLDER
        show(f"{name}: weights")
        ready = _as_stored(trt_export(model, linear=linear), onnx_folder, config)
        facts = {"states": encode_states(read_states(model)), "intermediates": ready.intermediates}
        _update_config(folder / name, facts)
        if missing is None:
            need = find_dialect(config.tensorrt).host_bytes(_weight_bytes(ready, onnx_folder))
            tell_need(name, need, show)
        write_weights(ready, REFERENCE_ROOT, onnx_folder / WEIGHTS_FILE)
        if missing is None:
            show_stage = partial(_show_stage, show, name)
            built[name] = _build(
                folder / name, ready.model, profiles[name], config, linear, timing_cache, show_stage
            )
        else:
            write_file(onnx_folder / "model.onnx", ready.model.SerializeToString())
    if missing is not None:
        write_file(folder / BUILD_SCRIPT, build_script(profiles, config.tensorrt).encode(), 0o777)
    return Engines(built, missing)


def _as_stored(ready: TrtExport, folder: Path, config: EngineConfig) -> TrtExport:
    """Keep quantised weights packed, if our plugins or the builder compute with them."""
    if config.tensorrt.packs_by_plugin(config.dtype):
        return keep_packed_products(ready, REFERENCE_ROOT, folder)
    if not RUNTIMES[config.tensorrt.runtime].weights:
        return ready
    chips = (find_dialect(config.tensorrt).build_arch(config.tensorrt) or "").split("+")
    return keep_packed(ready, REFERENCE_ROOT, folder, fp8=not chips_without_fp8(chips))


def _weight_bytes(ready: TrtExport, folder: Path) -> int:
    packed = folder / PACKED_FILE
    return ready.weight_bytes + (packed.stat().st_size if packed.exists() else 0)


def _show_stage(show: Callable[[str], object], graph: str, what: str) -> None:
    show(f"{graph}: {what}")


def _build(
    folder: Path,
    model: onnx.ModelProto,
    profiles: Sequence[Profile],
    config: EngineConfig,
    linear: bool,
    timing_cache: Path,
    show: Callable[[str], object],
) -> BuiltEngine:
    """Build an engine whose attention reads its cache early, if the built engine allows it."""

    def attempt(graph: onnx.ModelProto) -> BuiltEngine:
        file = folder / ONNX_FOLDER / "model.onnx"
        write_file(file, graph.SerializeToString())
        return build_engine(file, folder / ENGINE_FILE, profiles, config, timing_cache, show)

    built = None
    if find_dialect(config.tensorrt).prefetch_safe:
        with suppress(CopiesCacheError):
            built = attempt(with_prefetch_safe(model))
    built = built or attempt(model)
    if not config.tensorrt.strip_weights:
        shutil.rmtree(folder / ONNX_FOLDER)
    facts = describe_engine(config.tensorrt, built.num_bytes, linear=linear).model_dump()
    _update_config(folder, {"engine": facts})
    return built


def _update_config(folder: Path, entries: Mapping[str, object]) -> None:
    """Add ``entries`` to a graph's ``config.json``."""
    file = folder / "config.json"
    write_file(file, json.dumps(json.loads(file.read_bytes()) | entries, indent=2).encode())
