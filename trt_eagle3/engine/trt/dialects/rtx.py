"""TensorRT for RTX: engines for named chips, built without a GPU, compiled when loaded.

It has the plugin interfaces of TensorRT 11 and its strongly typed networks. Its wheels hold the
library under its numbered name alone, which its own parser does not ask for.

Its builder computes with INT4 and INT8 weights behind a DequantizeLinear, and from SM89 on with FP8
ones, which is how ``packed_weights.py`` writes them. It refuses a chip that lacks a type by its
name: a format joins by what it writes there.
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

_PARSERS_NAME = "libtensorrt_rtx.so"  # what the parser asks for at the first plugin node
_CHIPS: tuple[str, ...] = get_args(Chip)
_MEMORY_PER_WEIGHT = 2.3  # host bytes of a build by bytes of weights: docs/measurements.md


@dataclass
class RuntimeOptions:
    """What all contexts of an engine are made from.

    Attributes:
        lazy, eager: its ``IRuntimeConfig`` for contexts that run as they are, and for those that
            are captured. cache: the kernels compiled so far. file: where they stay.
        num_bytes: size of the file as it is.
    """

    lazy: Any
    eager: Any
    cache: Any
    file: Path
    num_bytes: int = 0


class TensorRTForRTX(TensorRT11):
    """It times no kernels, and tells of an engine only what its builder logs.

    Attention is never built prefetch-safe here: nobody has seen which launches such an engine puts
    before it.
    """

    prefetch_safe = False
    times_kernels = False

    @cached_property
    def log(self) -> Log:
        """Keeps what the builder says of the engine, too."""
        return Log(self.trt, KEPT)

    def create(self, kind: str, *parents: Any) -> Any:
        """A builder's log begins with it."""
        if kind == "Builder":
            self.log.told.clear()
        return super().create(kind, *parents)

    def host_bytes(self, weight_bytes: int) -> int:
        """Those of the graph, and of the engine that is made of it."""
        return int(weight_bytes * _MEMORY_PER_WEIGHT)

    # Which GPU

    def build_arch(self, config: TensorRTConfig) -> str | None:
        """``engine.tensorrt.chips`` (``sm89+sm120``), else this machine's GPU.

        Raises:
            UserError: neither is there.
        """
        built = "+".join(config.chips) or gpu_arch()
        if built is None:
            raise UserError(
                "engine.tensorrt.chips: this machine has no GPU, so name those that will run the "
                f"engines: {', '.join(_CHIPS)}."
            )
        return built

    def runs_on(self, built: str, arch: str) -> bool:
        """Whether it is one of them."""
        return arch in built.split("+")

    # Building

    def prepare_parser(self, companion: Path) -> None:
        """Make the library known under the name that its parser asks for; a parser that does not
        find it ends the process.

        Args:
            companion: an empty library of that name which needs the one with the number.
        Raises:
            EnvironmentMissingError: there is nothing of that name.
        """
        linked = Path(self.trt.__file__).parents[1] / "tensorrt_rtx_libs" / _PARSERS_NAME
        for name in (str(companion), str(linked), _PARSERS_NAME):
            try:
                ctypes.CDLL(name)
            except OSError:
                continue
            return
        raise EnvironmentMissingError(
            f"{companion}: not there, and without this name the parser of TensorRT for RTX ends "
            "the process. Build it: make plugins puts it beside the plugin library."
        )

    def configure(
        self, settings: Any, network: Any, config: EngineConfig, wide: Collection[str]
    ) -> None:
        """Name the chips, and keep memory out of runs, so that they can be captured."""
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
        """Where a driver is: without one, its compiler fails in such builds."""
        self._need_driver("refit")
        super().make_refittable(settings)

    def strip_weights(self, settings: Any) -> None:
        """Likewise."""
        self._need_driver("strip_weights")
        super().strip_weights(settings)

    def _need_driver(self, key: str) -> None:
        if gpu_arch() is None:
            raise UserError(
                f"engine.tensorrt.{key}: TensorRT for RTX builds such engines where a GPU is, and "
                "torch sees none. Leave it out."
            )

    def write_engine(self, builder: Any, network: Any, settings: Any, file: Path) -> bool:
        """As it is serialised: an engine that is never whole in memory is a third less of it."""
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
        """What the builder has logged; the same with a GPU and without."""
        del file
        return read_build_log(self.log.told)

    # Running

    def runtime_options(self, engine: Any, cache_file: Path) -> RuntimeOptions:
        """Configurations and a cache of compiled kernels for all contexts of ``engine``.

        Kernels of shapes that are new come later, and something else stands in for them meanwhile,
        which a CUDA graph would keep: for capture they are compiled before they run. A cache of
        another GPU, driver or version is refused by TensorRT, and begins anew.
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
        """A context of one of ``options``, whose memory the user manages."""
        return engine.create_execution_context(options.eager if captured else options.lazy)

    def is_capturable(self, context: Any, stream: int) -> bool:
        """As the context says: it may hold a layer that cannot be captured."""
        return bool(context.is_stream_capturable(stream))

    def keep_compiled(self, options: Any) -> None:
        """Write the cache where it has grown; a bundle that cannot be written to has none."""
        compiled = bytes(memoryview(options.cache.serialize()))
        if len(compiled) == options.num_bytes:
            return
        options.num_bytes = len(compiled)
        try:
            write_file(options.file, compiled)
        except (OSError, UserError):  # a bundle mounted read-only: compiled anew at every start
            return


class _RefusedError(Exception):
    """The builder refuses: its log says why."""


def _writer(trt: Any, stream: IO[bytes]) -> Any:
    """An ``IStreamWriter`` onto ``stream``, which keeps the ``error`` that the bindings lose."""

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
