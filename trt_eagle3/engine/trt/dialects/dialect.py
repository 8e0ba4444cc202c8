"""The questions that TensorRT's versions answer differently; each version answers in its file."""

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
    """What a built engine consists of.

    Attributes:
        layers: as TensorRT describes them, mappings or names. device_bytes: activation memory that
            a context wants.
        copied_inputs: inputs that it copies at every step, where TensorRT says so by name.
    """

    layers: list[Any]
    device_bytes: int
    copied_inputs: tuple[str, ...] = ()


class Dialect(ABC):
    """A TensorRT in this process. Names that every version has are used on ``trt`` directly.

    Attributes:
        package: a key of ``registry.PACKAGES``. trt: the module.
        dtypes: compute types that it has. default_level: ``optimization_level`` where the config
            has none; None leaves TensorRT's own.
        weakly_typed: whether it must be told what to compute in float32, beyond the graph's types.
        linear_by_plugin: whether products with a 16-bit weight are better computed by our plugin.
        prefetch_safe: whether to build attention that reads its inputs early, which an engine that
            copies them must not have; False where engines always copy them.
        times_kernels: whether building measures kernels, which a timing cache then keeps.
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
        """As the package says it."""
        return str(self.trt.__version__)

    @cached_property
    def log(self) -> Log:
        """The process's log: TensorRT keeps the first logger that it is given."""
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
        """What engines built here are for (``sm90``); None where none can be built."""
        del config
        return gpu_arch()

    def runs_on(self, built: str, arch: str) -> bool:
        """Whether an engine for ``built`` (of ``build_arch``) runs on a GPU of ``arch``."""
        return built == arch

    # Building

    def host_bytes(self, weight_bytes: int) -> int | None:
        """Most host memory that a build of so many bytes of weights takes; None where it is not
        known.
        """
        del weight_bytes
        return None

    def prepare_parser(self, companion: Path) -> None:
        """Make sure that graphs with plugin nodes can be parsed, with the help of ``companion``.

        Raises:
            EnvironmentMissingError: they cannot here.
        """
        del companion

    def create(self, kind: str, *parents: Any) -> Any:
        """A ``Builder``, ``Runtime`` or another object that takes our logger.

        Raises:
            EnvironmentMissingError: TensorRT gives none: CUDA does not start, or the driver is too
                old for it.
        """
        self.log.errors.clear()
        try:
            return getattr(self.trt, kind)(*parents, self.log.logger)
        except TypeError as error:  # how its bindings tell of a null pointer
            raise EnvironmentMissingError(
                f"TensorRT {self.version}: cannot make a {kind}: {self.log.take_reason()}. Check "
                "with nvidia-smi that the driver serves the CUDA that this TensorRT was built for."
            ) from error

    @abstractmethod
    def create_network(self, builder: Any) -> Any:
        """An empty network, with types as the graph gives them where the version can."""

    def configure(
        self, settings: Any, network: Any, config: EngineConfig, wide: Collection[str]
    ) -> None:
        """Make the builder keep the graph's types, and let plugins write into their inputs.

        Args:
            wide: names of nodes that the graph computes in float32 (rope angles, the residual
                stream), where the version is ``weakly_typed``.
        """
        del network, config, wide
        settings.clear_flag(self.trt.BuilderFlag.TF32)  # on by default; it rounds to ten bits

    def make_refittable(self, settings: Any) -> None:
        """Make engines whose weights can be exchanged."""
        settings.set_flag(self.trt.BuilderFlag.REFIT)

    @abstractmethod
    def strip_weights(self, settings: Any) -> None:
        """Make engines without their weights."""

    def show_progress(
        self, settings: Any, show: Callable[[str], object], stop: Callable[[], bool]
    ) -> None:
        """Have the builder tell ``show`` how far its outermost phase is, and end when it must
        ``stop``, where it can.
        """
        del settings, show, stop

    @abstractmethod
    def find_creator(self, plugin: str, version: str) -> Any | None:
        """The creator of ``plugin`` in TensorRT's registry."""

    def write_engine(self, builder: Any, network: Any, settings: Any, file: Path) -> bool:
        """Build ``network`` into ``file``, which appears whole; false where TensorRT refuses.

        Raises:
            OSError: it cannot be written.
        """
        plan = builder.build_serialized_network(network, settings)
        if plan is not None:
            write_file(file, memoryview(plan))
        return plan is not None

    def inspect(self, file: Path) -> Inspection | None:
        """What the engine in ``file`` consists of; None where TensorRT cannot load it."""
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
        """The engine in ``file``, read as it is mapped; None where TensorRT refuses it.

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
        """Device memory that a context of ``engine`` wants for activations, whatever its
        profile.
        """

    def runtime_options(self, engine: Any, cache_file: Path) -> Any:
        """What contexts of ``engine`` share, where this TensorRT has such a thing.

        Args:
            cache_file: where it may keep what it compiles.
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
        """A context in ``profile`` whose activations lie in ``num_bytes`` at ``address``; None
        where TensorRT refuses.

        Args:
            stream: what sets the profile, and must have run before the context does.
            options: ``runtime_options`` of the engine. captured: its runs go into a CUDA graph.
        """
        context = self.create_context(engine, options, captured=captured)
        if context is None:
            return None
        self.give_memory(context, address, num_bytes)
        try:
            return context if context.set_optimization_profile_async(profile, stream) else None
        except RuntimeError:  # how its bindings tell of a refusal
            return None

    @abstractmethod
    def create_context(
        self, engine: Any, options: Any = None, *, captured: bool = False
    ) -> Any | None:
        """A context that has no activation memory yet."""

    def is_capturable(self, context: Any, stream: int) -> bool:
        """Whether a run of ``context``, whose shapes are set, can be captured on ``stream``."""
        del context, stream
        return True

    def keep_compiled(self, options: Any) -> None:
        """Write what was compiled for ``runtime_options`` to its file."""
        del options

    @abstractmethod
    def give_memory(self, context: Any, address: int, num_bytes: int) -> None:
        """Let activations lie in ``num_bytes`` at ``address``."""

    @abstractmethod
    def read_weights(self, engine: Any, onnx_file: str) -> bool:
        """Put the weights of an ONNX file into a stripped engine; false where TensorRT refuses."""
