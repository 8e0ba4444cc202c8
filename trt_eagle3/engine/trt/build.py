"""An ONNX graph with plugin nodes becomes a TensorRT engine."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx

from trt_eagle3.atomic_io import write_file
from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.build_job import BuiltEngine
from trt_eagle3.engine.trt.log import create_builder, create_runtime, log
from trt_eagle3.engine.trt.plugins import load_plugins
from trt_eagle3.engine.trt.profiles import Profile
from trt_eagle3.engine.trt.versions import (
    allow_aliases,
    check_dtype,
    configure_types,
    create_network,
    device_bytes,
    major,
    show_progress,
    strip_weights,
    tensorrt,
)
from trt_eagle3.errors import TrtEagle3Error, UserError
from trt_eagle3.graph.ops import PLUGINS
from trt_eagle3.graph.trt_export import float32_nodes, is_prefetch_safe

__all__ = ["INSPECTION_FILE", "CopiesCacheError", "build_engine"]

INSPECTION_FILE = "inspection.json"
_LEVEL_OF_86 = 2  # level 3, TensorRT's default, took over four minutes for four layers there
_FIX = "Check the config's limits, or lower engine.tensorrt.optimization_level."


class CopiesCacheError(TrtEagle3Error):
    """The engine copies at every step what its attention would read early."""


def build_engine(
    onnx_file: Path,
    engine_file: Path,
    profiles: Sequence[Profile],
    config: EngineConfig,
    timing_cache: Path,
    show: Callable[[str], object] = str,
) -> BuiltEngine:
    """Build ``onnx_file`` (``graph/trt_export.py``) for ``profiles``; writes the engine and its
    inspection.

    Args:
        timing_cache: read where it exists, and written again with what this build has timed.
        show: told how far the build is.
    Raises:
        UserError: TensorRT refuses the graph or cannot build it, in its words.
        EnvironmentMissingError: the plugin library is not found or does not load.
        CopiesCacheError: the graph is one of ``with_prefetch_safe``, and TensorRT puts a copy in
            its way.
    """
    trt, messages = tensorrt(), log()
    check_dtype(config.dtype)
    load_plugins(config)
    start = time.perf_counter()
    builder = create_builder()
    network = create_network(builder)
    show("reading the graph")
    parser = trt.OnnxParser(network, messages.logger)
    if not parser.parse(onnx_file.read_bytes(), path=str(onnx_file)):
        _refuse(parser, onnx_file)
    model = onnx.load(onnx_file, load_external_data=False)
    settings = _settings(builder, network, profiles, config, float32_nodes(model))
    _read_timing_cache(settings, timing_cache)
    show("timing kernels")
    with _interrupt_noted() as interrupted:
        show_progress(settings, show, interrupted)
        plan = builder.build_serialized_network(network, settings)
    if plan is None:
        messages.fail(f"{onnx_file}: cannot build an engine", _FIX)
    write_file(engine_file, memoryview(plan))
    write_file(timing_cache, bytes(memoryview(settings.get_timing_cache().serialize())))
    return _inspect(
        engine_file, plan, profiles, time.perf_counter() - start, is_prefetch_safe(model)
    )


@contextmanager
def _interrupt_noted() -> Iterator[Callable[[], bool]]:
    """Within the block Ctrl-C is noted, and raised when it ends: raised in what TensorRT calls it
    would be lost.

    Only the main thread is told of Ctrl-C; in another one nothing changes.
    """
    noted = threading.Event()
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, lambda *_: noted.set()) if is_main else None
    try:
        yield noted.is_set
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    if noted.is_set():
        raise KeyboardInterrupt


def _refuse(parser: Any, onnx_file: Path) -> None:
    error = parser.get_error(0) if parser.num_errors else None
    reason = (
        f"node {error.node()}: {' '.join(error.desc().split())}"
        if error
        else "the parser gives no reason"
    )
    log().errors.clear()
    raise UserError(f"{onnx_file}: TensorRT cannot read the graph: {reason[:400]}.")


def _settings(
    builder: Any,
    network: Any,
    profiles: Sequence[Profile],
    config: EngineConfig,
    wide: Collection[str],
) -> Any:
    trt, wanted = tensorrt(), config.tensorrt
    settings = builder.create_builder_config()
    level = wanted.optimization_level
    if level is None and major() < 10:
        level = _LEVEL_OF_86
    if level is not None:
        settings.builder_optimization_level = level
    if wanted.workspace_mib is not None:
        settings.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, wanted.workspace_mib << 20)
    if wanted.refit:
        settings.set_flag(trt.BuilderFlag.REFIT)
    if wanted.strip_weights:
        strip_weights(settings)
    # layer names and types for the inspection
    settings.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    settings.max_aux_streams = 0  # the graphs are chains: more streams only add waits
    configure_types(settings, network, config.dtype, wide)
    allow_aliases(settings)
    for profile in profiles:
        shapes = builder.create_optimization_profile()
        for name, bounds in profile.shapes.items():
            shapes.set_shape(name, *bounds)
        if settings.add_optimization_profile(shapes) < 0:
            log().fail(f"profile {profile.name}", _FIX)
    return settings


def _read_timing_cache(settings: Any, file: Path) -> None:
    known = file.read_bytes() if file.is_file() else b""
    cache = settings.create_timing_cache(known)
    # of another TensorRT or GPU: no error, of no use
    if cache is None or not settings.set_timing_cache(cache, False):
        settings.set_timing_cache(settings.create_timing_cache(b""), False)
    log().errors.clear()


def _inspect(
    engine_file: Path, plan: Any, profiles: Sequence[Profile], seconds: float, early: bool
) -> BuiltEngine:
    """Write what the engine consists of beside it, and sum it up."""
    trt = tensorrt()
    engine = create_runtime().deserialize_cuda_engine(memoryview(plan))
    if engine is None:
        log().fail(f"{engine_file}: cannot load what was just built", _FIX)
    inspector = engine.create_engine_inspector()
    found = json.loads(
        inspector.get_engine_information(trt.LayerInformationFormat.JSON), strict=False
    )
    layers = found.get("Layers", []) if isinstance(found, dict) else []
    _check_prefetch_safe(engine_file, layers, early)
    plugins = Counter(plugin for layer in layers if (plugin := _plugin_of(layer)))
    built = BuiltEngine(
        num_bytes=engine_file.stat().st_size,
        seconds=seconds,
        num_layers=len(layers),
        num_plugins=plugins.total(),
        device_bytes=device_bytes(engine),
    )
    facts = {
        "tensorrt": trt.__version__,
        "seconds": round(seconds, 1),
        "engine_bytes": built.num_bytes,
        "device_memory_bytes": built.device_bytes,
        "plugins": dict(plugins),
        "profiles": {profile.name: profile.shapes for profile in profiles},
        "layers": layers,
    }
    write_file(engine_file.with_name(INSPECTION_FILE), json.dumps(facts, indent=1).encode())
    return built


def _check_prefetch_safe(engine_file: Path, layers: Sequence[Any], early: bool) -> None:
    """Refuse an engine that copies at every step what a plugin may read before that is done.

    Raises:
        CopiesCacheError: it is a cache, the page table or lengths of TreeAttention. UserError: a
            weight of Linear.
    """
    known = [layer for layer in layers if isinstance(layer, dict)]
    copies = {
        t["Name"]
        for layer in known
        if layer.get("LayerType") == "Reformat"
        for t in layer.get("Outputs", [])
    }

    def copied(plugin: str, inputs: slice) -> str | None:
        readers = (layer for layer in known if _plugin_of(layer) == plugin)
        return next(
            (
                t["Name"]
                for r in readers
                for t in r.get("Inputs", [])[inputs]
                if t["Name"] in copies
            ),
            None,
        )

    if weight := copied("Linear", slice(1, 2)):
        raise UserError(
            f"{engine_file}: TensorRT copies {weight} at every step, which our product may read "
            "too early. Set engine.tensorrt.linear: tensorrt."
        )
    if early and (cache := copied("TreeAttention", slice(3, 8))):
        raise CopiesCacheError(
            f"{engine_file}: TensorRT copies {cache} at every step, which attention reads early"
        )


def _plugin_of(layer: Any) -> str | None:
    """Which of our ops took this layer; a layer is a mapping, or a name where TensorRT says no
    more.
    """
    if not isinstance(layer, dict):
        return next((name for name in PLUGINS if name in str(layer)), None)
    if not str(layer.get("LayerType", "")).lower().startswith("plugin"):
        return None
    # of the layer itself before what it reads
    texts = (str(layer.get("Name", "")), json.dumps(layer))
    return next((name for text in texts for name in PLUGINS if name in text), None)
