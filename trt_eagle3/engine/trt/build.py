"""Build a TensorRT engine from an ONNX graph with plugin nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import onnx

from trt_eagle3.atomic_io import write_file
from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.builder.job import BuiltEngine
from trt_eagle3.engine.trt.dialects.dialect import Dialect
from trt_eagle3.engine.trt.dialects.registry import find_dialect
from trt_eagle3.engine.trt.inspection import (
    check_prefetch_safe,
    check_states_in_place,
    write_inspection,
)
from trt_eagle3.engine.trt.interrupt import interrupt_noted
from trt_eagle3.engine.trt.packed_file import packed_counts
from trt_eagle3.engine.trt.plugins import load_plugins
from trt_eagle3.engine.trt.profiles import Profile
from trt_eagle3.errors import UserError
from trt_eagle3.graph.states import read_states
from trt_eagle3.graph.trt_export import float32_nodes, is_prefetch_safe

__all__ = ["build_engine"]

_OUR_PREFIX = "trt_eagle3: "  # prefix of the plugins' log messages
_FIX = "Check the config's limits, or lower engine.tensorrt.optimization_level."


def build_engine(
    onnx_file: Path,
    engine_file: Path,
    profiles: Sequence[Profile],
    config: EngineConfig,
    timing_cache: Path,
    show: Callable[[str], object] = str,
) -> BuiltEngine:
    """Build ``onnx_file`` (``graph/trt_export.py``) for ``profiles``; write the engine and its
    inspection.

    Args:
        timing_cache: read if it exists, and written again with the timings of this build.
        show: called with the progress of the build.
    Raises:
        UserError: TensorRT refuses the graph or cannot build it (the message quotes its reason), or
            the engine copies a state.
        EnvironmentMissingError: the plugin library is missing or does not load.
        CopiesCacheError: the graph comes from ``with_prefetch_safe``, and TensorRT inserts a copy
            before an early read.
    """
    dialect = find_dialect(config.tensorrt)
    dialect.check_dtype(config.dtype)
    load_plugins(config.tensorrt)
    start = time.perf_counter()
    builder = dialect.create("Builder")
    network = dialect.create_network(builder)
    show("reading the graph")
    _parse(dialect, network, onnx_file)
    model = onnx.load(onnx_file, load_external_data=False)
    wide = float32_nodes(model) if dialect.weakly_typed else set()
    settings = _settings(dialect, builder, network, profiles, config, wide)
    if dialect.times_kernels:
        _read_timing_cache(dialect, settings, timing_cache)
        show("timing kernels")
    with interrupt_noted() as interrupted:
        # an interrupt that is raised within a callback of TensorRT would be lost
        dialect.show_progress(settings, show, interrupted)
        built = dialect.write_engine(builder, network, settings, engine_file)
    if not built:
        dialect.log.fail(f"{onnx_file}: cannot build an engine", _FIX)
    if dialect.times_kernels:
        write_file(timing_cache, bytes(memoryview(settings.get_timing_cache().serialize())))
    seconds = time.perf_counter() - start
    found = dialect.inspect(engine_file)
    if found is None:
        dialect.log.fail(f"{engine_file}: cannot load what was just built", _FIX)
    check_states_in_place(engine_file, found.copied_inputs, read_states(model))
    check_prefetch_safe(engine_file, found.layers, is_prefetch_safe(model))
    packed = packed_counts(model)
    return write_inspection(dialect, engine_file, found, profiles, packed, seconds)


def _parse(dialect: Dialect, network: Any, onnx_file: Path) -> None:
    parser = dialect.create("OnnxParser", network)
    if parser.parse(onnx_file.read_bytes(), path=str(onnx_file)):
        return
    reason = _parsers_reason(parser)
    ours = next((text for text in dialect.log.errors if text.startswith(_OUR_PREFIX)), None)
    dialect.log.errors.clear()
    if ours is not None:  # our plugin's error has more detail than the parser's
        reason = f"{ours.removeprefix(_OUR_PREFIX)} ({reason})"
    raise UserError(f"{onnx_file}: TensorRT cannot read the graph: {reason[:400]}.")


def _parsers_reason(parser: Any) -> str:
    if not parser.num_errors:
        return "the parser gives no reason"
    error = parser.get_error(0)
    return f"node {error.node()}: {' '.join(error.desc().split())}"


def _settings(
    dialect: Dialect,
    builder: Any,
    network: Any,
    profiles: Sequence[Profile],
    config: EngineConfig,
    wide: Collection[str],
) -> Any:
    trt, wanted = dialect.trt, config.tensorrt
    settings = builder.create_builder_config()
    level = wanted.optimization_level
    if level is None:
        level = dialect.default_level
    if level is not None:
        settings.builder_optimization_level = level
    if wanted.workspace_mib is not None:
        settings.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, wanted.workspace_mib << 20)
    if wanted.refit:
        dialect.make_refittable(settings)
    if wanted.strip_weights:
        dialect.strip_weights(settings)
    # layer names and types for the inspection
    settings.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    settings.max_aux_streams = 0  # the graphs are chains: more streams only add waits
    dialect.configure(settings, network, config, wide)
    for profile in profiles:
        _add_profile(dialect, builder, settings, profile)
    return settings


def _add_profile(dialect: Dialect, builder: Any, settings: Any, profile: Profile) -> None:
    shapes = builder.create_optimization_profile()
    for name, bounds in profile.shapes.items():
        shapes.set_shape(name, *bounds)
    if settings.add_optimization_profile(shapes) < 0:
        dialect.log.fail(f"profile {profile.name}", _FIX)


def _read_timing_cache(dialect: Dialect, settings: Any, file: Path) -> None:
    known = file.read_bytes() if file.is_file() else b""
    cache = settings.create_timing_cache(known)
    # a cache of another TensorRT or GPU is no error, but is useless
    if cache is None or not settings.set_timing_cache(cache, False):
        settings.set_timing_cache(settings.create_timing_cache(b""), False)
    dialect.log.errors.clear()
