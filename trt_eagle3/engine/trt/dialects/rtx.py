"""TensorRT for RTX: engines for given chips, built without a GPU, compiled when loaded.

It has the plugin interfaces of TensorRT 11 and strongly typed networks. Its wheels hold the library
only under its numbered name, but its own parser requests the name without a number.

Its builder computes with INT4 and INT8 weights behind a DequantizeLinear, and with FP8 weights from
SM89 on. ``packed_weights.py`` writes them so. The builder refuses a chip that lacks a type, and
names it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, get_args

from trt_eagle3.atomic_io import atomic_file, write_file
from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.runtime.machine import gpu_arch
from trt_eagle3.engine.trt.dialects.dialect import Inspection
from trt_eagle3.engine.trt.dialects.rtx_log import KEPT, read_build_log
from trt_eagle3.engine.trt.dialects.v11 import TensorRT11
from trt_eagle3.engine.trt.log import Log
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.tensorrt_config import Chip, TensorRTConfig

__all__ = ["RuntimeOptions", "TensorRTForRTX"]

_PARSERS_NAME = "libtensorrt_rtx.so"  # requested by the parser at the first plugin node
_CHIPS: tuple[str, ...] = get_args(Chip)
_MEMORY_PER_WEIGHT = 2.3  # host bytes of a build per byte of weights: docs/measurements.md


@dataclass
class RuntimeOptions:
    """Options that all contexts of an engine share.

    Attributes:
        lazy, eager: ``IRuntimeConfig`` for contexts that are launched, and for those that are
            captured. cache: the kernels compiled so far. file: the cache's file.
        num_bytes: current size of the file.
    """

    lazy: Any
    eager: Any
    cache: Any
    file: Path
    num_bytes: int = 0


class TensorRTForRTX(TensorRT11):
    """TensorRT for RTX: it times no kernels, and only its builder's log describes an engine.

    Attention is never built prefetch-safe: it is unknown which launches such an engine puts before
    it.
    """

    prefetch_safe = False
    times_kernels = False

    @cached_property
    def log(self) -> Log:
        """The process's log, which also keeps the builder's messages about the engine."""
        return Log(self.trt, KEPT)

    def create(self, kind: str, *parents: Any) -> Any:
        """Create an object; a new builder starts a new log."""
        if kind == "Builder":
            self.log.told.clear()
        return super().create(kind, *parents)

    def host_bytes(self, weight_bytes: int) -> int:
        """Return the bytes of the graph and of the engine that is made of it."""
        return int(weight_bytes * _MEMORY_PER_WEIGHT)

    # Which GPU

    def build_arch(self, config: TensorRTConfig) -> str | None:
        """Return ``engine.tensorrt.chips`` (``sm89+sm120``), else this machine's GPU.

        Raises:
            UserError: there is neither.
        """
        built = "+".join(config.chips) or gpu_arch()
        if built is None:
            raise UserError(
                "engine.tensorrt.chips: this machine has no GPU. Name the chips that will run the "
                f"engines: {', '.join(_CHIPS)}."
            )
        return built

    def runs_on(self, built: str, arch: str) -> bool:
        """Return whether ``arch`` is one of the chips."""
        return arch in built.split("+")

    # Building

    def prepare_parser(self, companion: Path) -> None:
        """Load a library with the name that the parser requests. A parser that does not find it
        ends the process.

        Args:
            companion: an empty library of that name, linked to the numbered one.
        Raises:
            EnvironmentMissingError: there is no library of that name.
        """
        linked = Path(self.trt.__file__).parents[1] / "tensorrt_rtx_libs" / _PARSERS_NAME
        for name in (str(companion), str(linked), _PARSERS_NAME):
            try:
                ctypes.CDLL(name)
            except OSError:
                continue
            return
        raise EnvironmentMissingError(
            f"{companion}: not found; without this library the parser of TensorRT for RTX ends "
            "the process. Build it: make plugins puts it next to the plugin library."
        )

    def configure(
        self, settings: Any, network: Any, config: EngineConfig, wide: Collection[str]
    ) -> None:
        """Set the chips, and allow no allocation during runs, so that they can be captured."""
        super().configure(settings, network, config, wide)
        settings.set_flag(self.trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        chips = (self.build_arch(config.tensorrt) or "").split("+")
        settings.num_compute_capabilities = len(chips)
        for index, chip in enumerate(chips):
            settings.set_compute_capability(self._capability(chip), index)

    def _capability(self, chip: str) -> Any:
        if chip not in _CHIPS:
            raise UserError(
                f"engine.tensorrt.chips: TensorRT for RTX builds for {', '.join(_CHIPS)}, got this "
                f"machine's {chip}. Name one of these, or use runtime: tensorrt."
            )
        return getattr(self.trt.ComputeCapability, chip.upper())

    def make_refittable(self, settings: Any) -> None:
        """Allow refitting. This needs a driver: without one, the builder's compiler fails."""
        self._need_driver("refit")
        super().make_refittable(settings)

    def strip_weights(self, settings: Any) -> None:
        """Strip weights. This needs a driver, as refitting does."""
        self._need_driver("strip_weights")
        super().strip_weights(settings)

    def _need_driver(self, key: str) -> None:
        if gpu_arch() is None:
            raise UserError(
                f"engine.tensorrt.{key}: TensorRT for RTX needs a GPU to build such engines, and "
                "torch sees none. Leave it out."
            )

    def write_engine(self, builder: Any, network: Any, settings: Any, file: Path) -> bool:
        """Stream the engine to ``file``: it is never whole in memory, which saves a third."""
        with suppress(_RefusedError), atomic_file(file) as stream:
            writer = _writer(self.trt, stream)
            built = builder.build_serialized_network_to_stream(network, settings, writer)
            if writer.error is not None:
                raise writer.error
            if not built:
                raise _RefusedError
            return True
        return False

    def inspect(self, file: Path) -> Inspection | None:
        """Return the contents that the builder has logged; the same with and without a GPU."""
        del file
        return read_build_log(self.log.told)

    # Running

    def runtime_options(self, engine: Any, cache_file: Path) -> RuntimeOptions:
        """Create configurations and a cache of compiled kernels for all contexts of ``engine``.

        Kernels for new shapes are compiled later, and substitutes run meanwhile. A CUDA graph would
        keep the substitutes, so contexts for capture compile their kernels before they run.
        TensorRT refuses a cache of another GPU, driver or version; then the cache starts empty.
        """
        kinds = self.trt.DynamicShapesKernelSpecializationStrategy
        lazy, eager = self._config(engine, kinds.LAZY), self._config(engine, kinds.EAGER)
        cache = eager.create_runtime_cache()
        known = cache_file.read_bytes() if cache_file.is_file() else b""
        taken = bool(known) and cache.deserialize(known)
        self.log.errors.clear()
        for config in (lazy, eager):
            config.set_runtime_cache(cache)
        return RuntimeOptions(lazy, eager, cache, cache_file, len(known) if taken else 0)

    def _config(self, engine: Any, specialization: Any) -> Any:
        config = engine.create_runtime_config()
        strategy = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        config.set_execution_context_allocation_strategy(strategy)
        config.dynamic_shapes_kernel_specialization_strategy = specialization
        return config

    def create_context(
        self, engine: Any, options: Any = None, *, captured: bool = False
    ) -> Any | None:
        """Create a context from one of ``options``; the user manages its memory."""
        return engine.create_execution_context(options.eager if captured else options.lazy)

    def is_capturable(self, context: Any, stream: int) -> bool:
        """Return the context's own answer: it may hold a layer that cannot be captured."""
        return bool(context.is_stream_capturable(stream))

    def keep_compiled(self, options: Any) -> None:
        """Write the cache if it has grown; a read-only bundle gets none."""
        compiled = bytes(memoryview(options.cache.serialize()))
        if len(compiled) == options.num_bytes:
            return
        options.num_bytes = len(compiled)
        try:
            write_file(options.file, compiled)
        except (OSError, UserError):  # a bundle mounted read-only: compile at every start
            return


class _RefusedError(Exception):
    """The builder refuses the network; its log has the reason."""


def _writer(trt: Any, stream: IO[bytes]) -> Any:
    """Create an ``IStreamWriter`` onto ``stream``; it keeps an ``error`` that bindings lose."""

    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.error: OSError | None = None

        def write(self, data: bytes) -> int:
            try:
                return stream.write(data)
            except OSError as error:
                self.error = error
                return 0

    return Writer()
