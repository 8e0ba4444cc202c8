"""Differences between TensorRT's versions; each version implements them in its own file."""

from __future__ import annotations

import json
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from trt_eagle3.atomic_io import write_file
from trt_eagle3.config import EngineConfig, TensorRTConfig
from trt_eagle3.engine.runtime.machine import gpu_arch
from trt_eagle3.engine.trt.log import Log
from trt_eagle3.errors import EnvironmentMissingError, UserError

__all__ = ["Dialect", "Inspection"]


@dataclass(frozen=True)
class Inspection:
    """Contents of a built engine.

    Attributes:
        layers: as TensorRT describes them, mappings or names. device_bytes: activation memory of a
            context.
        copied_inputs: inputs that the engine copies in every step, if TensorRT lists them by name.
    """

    layers: list[Any]
    device_bytes: int
    copied_inputs: tuple[str, ...] = ()


class Dialect(ABC):
    """A TensorRT in this process. Names that all versions share are used on ``trt`` directly.

    Attributes:
        package: a key of ``registry.PACKAGES``. trt: the module.
        dtypes: supported compute types. default_level: ``optimization_level`` if the config has
            none; None keeps TensorRT's default.
        weakly_typed: whether the builder also needs a list of float32 layers.
        linear_by_plugin: whether our plugin is the better choice for products with 16-bit weights.
        prefetch_safe: whether to try attention that reads its inputs early. An engine that copies
            those inputs must not do so. False if engines always copy them.
        times_kernels: whether building measures kernels; a timing cache keeps the timings.
    """

    dtypes: ClassVar[Collection[str]] = ("float32", "float16", "bfloat16")
    default_level: ClassVar[int | None] = None
    weakly_typed: ClassVar[bool] = False
    linear_by_plugin: ClassVar[bool] = False
    prefetch_safe: ClassVar[bool] = True
    times_kernels: ClassVar[bool] = True

    def __init__(self, package: str, trt: Any) -> None:
        self.package = package
        self.trt = trt

    @property
    def version(self) -> str:
        """The package's version."""
        return str(self.trt.__version__)

    @cached_property
    def log(self) -> Log:
        """The process's log: TensorRT keeps the first logger that it receives."""
        return Log(self.trt)

    def check_dtype(self, dtype: str) -> None:
        """Refuse a compute type that this TensorRT lacks."""
        if dtype not in self.dtypes:
            raise UserError(
                f"engine.dtype: {dtype} needs TensorRT 10 or later, this is {self.version}. "
                "Use float16, or upgrade."
            )

    # Which GPU

    def build_arch(self, config: TensorRTConfig) -> str | None:
        """Return the GPU architecture of engines built here (``sm90``); None without one."""
        del config
        return gpu_arch()

    def runs_on(self, built: str, arch: str) -> bool:
        """Return whether an engine built for ``built`` (``build_arch``) runs on a GPU ``arch``."""
        return built == arch

    # Building

    def host_bytes(self, weight_bytes: int) -> int | None:
        """Return the most host memory, in bytes, of a build with ``weight_bytes`` of weights; None
        if unknown.
        """
        del weight_bytes
        return None

    def prepare_parser(self, companion: Path) -> None:
        """Make sure that graphs with plugin nodes can be parsed, with the help of ``companion``.

        Raises:
            EnvironmentMissingError: they cannot be parsed here.
        """
        del companion

    def create(self, kind: str, *parents: Any) -> Any:
        """Create a ``Builder``, a ``Runtime`` or another object that takes our logger.

        Raises:
            EnvironmentMissingError: TensorRT returns none: CUDA does not start, or the driver is
                too old.
        """
        self.log.errors.clear()
        try:
            return getattr(self.trt, kind)(*parents, self.log.logger)
        except TypeError as error:  # raised by the bindings for a null pointer
            raise EnvironmentMissingError(
                f"TensorRT {self.version}: cannot make a {kind}: {self.log.take_reason()}. Check "
                "with nvidia-smi that the driver serves the CUDA that this TensorRT was built for."
            ) from error

    @abstractmethod
    def create_network(self, builder: Any) -> Any:
        """Create an empty network; it uses the graph's types if the version supports that."""

    def configure(
        self, settings: Any, network: Any, config: EngineConfig, wide: Collection[str]
    ) -> None:
        """Make the builder keep the graph's types, and allow plugins to write into their inputs.

        Args:
            wide: names of nodes that the graph computes in float32 (rope angles, the residual
                stream), if the version is ``weakly_typed``.
        """
        del network, config, wide
        settings.clear_flag(self.trt.BuilderFlag.TF32)  # on by default; it rounds to ten bits

    def make_refittable(self, settings: Any) -> None:
        """Build engines whose weights can be exchanged."""
        settings.set_flag(self.trt.BuilderFlag.REFIT)

    @abstractmethod
    def strip_weights(self, settings: Any) -> None:
        """Build engines without their weights."""

    def show_progress(
        self, settings: Any, show: Callable[[str], object], stop: Callable[[], bool]
    ) -> None:
        """Report the progress of the builder's outermost phase to ``show``, and end the build when
        ``stop`` returns True, if the version supports this.
        """
        del settings, show, stop

    @abstractmethod
    def find_creator(self, plugin: str, version: str) -> Any | None:
        """Return the creator of ``plugin`` in TensorRT's registry; None if it is not registered."""

    def write_engine(self, builder: Any, network: Any, settings: Any, file: Path) -> bool:
        """Build ``network`` into ``file``, written atomically; return False if TensorRT refuses.

        Raises:
            OSError: the file cannot be written.
        """
        plan = builder.build_serialized_network(network, settings)
        if plan is not None:
            write_file(file, memoryview(plan))
        return plan is not None

    def inspect(self, file: Path) -> Inspection | None:
        """Inspect the engine in ``file``; None if TensorRT cannot load it."""
        engine = self.load_engine(file)
        if engine is None:
            return None
        wanted = self.trt.LayerInformationFormat.JSON
        text = engine.create_engine_inspector().get_engine_information(wanted)
        found = json.loads(text, strict=False)
        layers = found.get("Layers", []) if isinstance(found, dict) else []
        return Inspection(layers, self.device_bytes(engine))

    # Running

    def load_engine(self, file: Path) -> Any | None:
        """Load the engine in ``file``, memory-mapped; None if TensorRT refuses it.

        Raises:
            OSError, ValueError: the file cannot be read, or is empty.
        """
        runtime = self.create("Runtime")
        with (
            file.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as plan,
        ):
            return runtime.deserialize_cuda_engine(plan)

    @abstractmethod
    def device_bytes(self, engine: Any) -> int:
        """Return the device memory, in bytes, that a context of ``engine`` needs for activations in
        any profile.
        """

    def runtime_options(self, engine: Any, cache_file: Path) -> Any:
        """Return the options that contexts of ``engine`` share, if this TensorRT has any.

        Args:
            cache_file: file for compiled kernels.
        """
        del engine, cache_file

    def new_context(
        self,
        engine: Any,
        address: int,
        num_bytes: int,
        profile: int,
        stream: int,
        options: Any = None,
        *,
        captured: bool = False,
    ) -> Any | None:
        """Create a context in ``profile`` whose activations lie in ``num_bytes`` at ``address``;
        None if TensorRT refuses.

        Args:
            stream: sets the profile; it must have done so before the context runs.
            options: ``runtime_options`` of the engine. captured: its runs go into a CUDA graph.
        """
        context = self.create_context(engine, options, captured=captured)
        if context is None:
            return None
        self.give_memory(context, address, num_bytes)
        try:
            return context if context.set_optimization_profile_async(profile, stream) else None
        except RuntimeError:  # raised by the bindings for a refusal
            return None

    @abstractmethod
    def create_context(
        self, engine: Any, options: Any = None, *, captured: bool = False
    ) -> Any | None:
        """Create a context without activation memory; None if TensorRT refuses."""

    def is_capturable(self, context: Any, stream: int) -> bool:
        """Return whether a run of ``context`` can be captured on ``stream``; its shapes are set."""
        del context, stream
        return True

    def keep_compiled(self, options: Any) -> None:
        """Write what was compiled for ``runtime_options`` to its file."""
        del options

    @abstractmethod
    def give_memory(self, context: Any, address: int, num_bytes: int) -> None:
        """Set the memory of activations: ``num_bytes`` at ``address``."""

    @abstractmethod
    def read_weights(self, engine: Any, onnx_file: str) -> bool:
        """Put the weights of an ONNX file into a stripped engine; False if TensorRT refuses."""
