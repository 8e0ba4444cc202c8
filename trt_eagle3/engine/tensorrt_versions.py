"""What differs between TensorRT 8.6, 10 and 11, and between machines; the one place that imports ``tensorrt``."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from trt_eagle3.config import EngineConfig
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.graph.plugin_ops import PLUGIN_VERSION, PLUGINS

__all__ = [
    "PLUGINS_VARIABLE",
    "Log",
    "check_dtype",
    "configure_types",
    "create_network",
    "gpu_arch",
    "load_plugins",
    "log",
    "major",
    "plugin_library_path",
    "progress_monitor",
    "tensorrt",
    "uses_linear",
]

PLUGINS_VARIABLE = "TRT_EAGLE3_PLUGINS"
OLDEST = (8, 6)
_LIBRARY_NAME = "libtrt_eagle3_plugins.so"


@cache
def tensorrt() -> Any:
    """The ``tensorrt`` module.

    Raises:
        EnvironmentMissingError: it is not installed, does not load, or is older than 8.6.
    """
    try:
        module = import_module("tensorrt")
    except Exception as error:  # a missing shared library is an ImportError or an OSError
        reason = " ".join(str(error).split())
        raise EnvironmentMissingError(
            f"TensorRT: {reason}. Install it: pip install 'trt-eagle3[tensorrt]', or use NVIDIA's TensorRT container."
        ) from error
    if tuple(map(int, module.__version__.split(".")[:2])) < OLDEST:
        raise EnvironmentMissingError(f"TensorRT {module.__version__}: 8.6, 10.x or 11.x is needed. Upgrade tensorrt.")
    return module


def major() -> int:
    """TensorRT's major version."""
    return int(tensorrt().__version__.split(".")[0])


def gpu_arch() -> str | None:
    """``sm90`` and the like for the current CUDA device; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    return "sm{}{}".format(*torch.cuda.get_device_capability())


def check_dtype(dtype: str) -> None:
    """Refuse a compute type that this TensorRT lacks."""
    if dtype == "bfloat16" and major() < 10:
        raise UserError(
            f"engine.dtype: bfloat16 needs TensorRT 10 or later, this is {tensorrt().__version__}. "
            "Use float16 with engine.residual: float32, or upgrade."
        )


def uses_linear(config: EngineConfig) -> bool:
    """Whether products with a 16-bit weight go to our plugin: ``engine.tensorrt.linear``.

    TensorRT 8.6 runs them as convolutions between layout copies; later versions have products of their own.
    """
    if config.dtype == "float32":
        return False
    if config.tensorrt.linear != "auto":
        return config.tensorrt.linear == "plugin"
    try:
        return major() < 10
    except EnvironmentMissingError:
        return False  # built by trtexec, which wants 10 or later


def create_network(builder: Any) -> Any:
    """An empty network: types as the graph gives them where the version can (10 and later)."""
    flags = tensorrt().NetworkDefinitionCreationFlag
    wanted = "STRONGLY_TYPED" if major() >= 10 else "EXPLICIT_BATCH"
    return builder.create_network(1 << int(getattr(flags, wanted)))


def configure_types(config: Any, network: Any, dtype: str, wide: Collection[str]) -> None:
    """Make the builder keep the graph's types: on 10 and later the network says so, on 8.6 layer by layer.

    8.6 is free to compute any layer of a float16 network in half. Those of ``wide``, the names of nodes that the graph
    computes in float32 (rope angles, the wide residual), must not be. The other layers are left free: their tensors say
    float32 there whatever the graph says, and holding them to that makes matrix products take twice the memory.
    """
    trt = tensorrt()
    config.clear_flag(trt.BuilderFlag.TF32)  # on by default; it rounds to ten bits
    if major() >= 10:
        return
    config.set_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806, True)  # always so later: a context per graph
    if dtype == "float32":
        return
    config.set_flag(trt.BuilderFlag.FP16)
    computing = {getattr(trt.LayerType, name) for name in _COMPUTING}
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.name in wide and layer.type in computing:
            config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
            layer.precision = trt.float32
            layer.set_output_type(0, trt.float32)


_COMPUTING = ("ACTIVATION", "ELEMENTWISE", "UNARY", "REDUCE", "SOFTMAX", "MATRIX_MULTIPLY", "NORMALIZATION")


def progress_monitor(show: Callable[[str], object]) -> Any | None:
    """An ``IProgressMonitor`` that tells ``show`` how far the outermost phase is; None before TensorRT 10."""
    trt = tensorrt()
    if not hasattr(trt, "IProgressMonitor"):
        return None

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self._steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            if total := self._steps.get(phase_name):
                show(f"{phase_name}, {100 * step // total} %")
            return True

        def phase_finish(self, phase_name: str) -> None:
            self._steps.pop(phase_name, None)

    return Monitor()


class Log:
    """What TensorRT says: errors are kept for ours, the rest goes nowhere."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.logger = _make_logger(self.errors)

    def fail(self, what: str, fix: str) -> NoReturn:
        """Raise a ``UserError`` about ``what``, with TensorRT's first reason."""
        reason = " ".join(self.errors[0].split()) if self.errors else "it gave no reason"
        self.errors.clear()
        raise UserError(f"{what}: TensorRT: {reason[:400]}. {fix}")


@cache
def log() -> Log:
    """The process's log: TensorRT keeps the first logger that it is given."""
    return Log()


def _make_logger(errors: list[str]) -> Any:
    trt = tensorrt()
    kept = {trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR}

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            if severity in kept:
                errors.append(msg)

    return Logger()


def plugin_library_path(config: EngineConfig | None = None) -> Path | None:
    """The library that the config names, or TRT_EAGLE3_PLUGINS, else beside this package or in plugins/build."""
    if config and config.tensorrt.plugin_library:
        return config.tensorrt.plugin_library
    if named := os.environ.get(PLUGINS_VARIABLE):
        return Path(named)
    package = Path(__file__).resolve().parents[1]
    places = (package / _LIBRARY_NAME, package.parent / "plugins" / "build" / _LIBRARY_NAME)
    return next((place for place in places if place.exists()), None)


def load_plugins(config: EngineConfig | None = None) -> Path:
    """Load the plugin library and see that TensorRT knows our ops; returns where it was found.

    Raises:
        EnvironmentMissingError: there is none, or it was built for another TensorRT.
    """
    path = plugin_library_path(config)
    fix = f"Build it: make plugins TENSORRT_INCLUDE=<TensorRT's include folder>, or name it in {PLUGINS_VARIABLE}."
    if path is None:
        raise EnvironmentMissingError(f"{_LIBRARY_NAME}: not found. {fix}")
    return _load(path, fix)


@cache
def _load(path: Path, fix: str) -> Path:
    registry = tensorrt().get_plugin_registry()
    log()
    try:
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)  # its creators register themselves
    except OSError as error:
        raise EnvironmentMissingError(f"{path}: cannot load the plugin library: {error}. {fix}") from error
    find = getattr(registry, "get_creator", None) or registry.get_plugin_creator
    missing = [op.plugin for op in PLUGINS.values() if find(op.plugin, PLUGIN_VERSION, "") is None]
    if missing:
        version = tensorrt().__version__
        raise EnvironmentMissingError(
            f"{path}: holds no plugin {missing[0]} version {PLUGIN_VERSION} for TensorRT {version}. {fix}"
        )
    return path
