"""As much of TensorRT's Python API as a build calls, with each version's own names; it notes
what it is asked for.
"""

from __future__ import annotations

import json
import os
import signal
import weakref
from collections.abc import Sequence
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

from tests.engine.tensorrt_api import RTX, Strict, members, version_of

__all__ = ["fake_tensorrt"]

ENUMS = (
    "BuilderFlag",
    "ComputeCapability",
    "DynamicShapesKernelSpecializationStrategy",
    "ExecutionContextAllocationStrategy",
    "LayerInformationFormat",
    "LayerType",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "PreviewFeature",
    "ProfilingVerbosity",
    "TensorIOMode",
)
LAYERS = [
    {"Name": "layers.0.input_layernorm/AddRmsNorm", "LayerType": "PluginV2"},
    {"Name": "layers.0.mlp.gate_up/Gemm", "LayerType": "CaskGemmConvolution"},
]
_ALIASES = "ALIASED_PLUGIN_IO_10_03"
_TENSORS = (
    "Inputs: [ {{ Name: {0}, Location: Device, Dimensions: [-1] }}], Outputs: [ {{ Name: {1}, "
)
_TENSORS += "Location: Device, Dimensions: [-1] }}], TacticValue: 0x0, StreamId: 0, Metadata: "
RTX_LAYERS = (
    ("Reformatting CopyNode for Network Input page_table", "NoOp", "page_table", "pages", ""),
    ("layers.0.mlp/AddRmsNorm_myl4_3", "custom_layer", "x", "y", "[ONNX Layer: a/AddRmsNorm]"),
    ("layers.0.out/TreeAttention", "PluginV3", "k_cache.0", "k_cache_out.0", ""),
    ("layers.0.out/TreeAttention [profile 1]", "PluginV3", "x [profile 1]", "y [profile 1]", ""),
)
"""Name, type, input, output and metadata of the layers that a builder of TensorRT for RTX logs."""


def _rtx_log(layers: Sequence[tuple[str, str, str, str, str]]) -> list[str]:
    """In the words of version 1.7.1."""
    lines = [
        f"Name: {name}, LayerType: {kind}, {_TENSORS.format(given, made)}{operators}"
        for name, kind, given, made, operators in layers
    ]
    return [
        "Layer: layers.0.out/TreeAttention Host Persistent: 80 bytes Device Persistent: 0 bytes "
        "Scratch Memory: 2304 bytes",
        "Total Activation Memory: 1024 bytes",
        "Total Activation Memory: 4096 bytes",
        "Engine generation completed in 2.6 seconds.",
        "Layers:\n" + "\n".join(lines),
    ]


class _Settings(SimpleNamespace):
    def __init__(self, *, takes_cache: bool, takes_shapes: bool) -> None:
        super().__init__(flags=set(), cleared=set(), features={}, profiles=[], pools={}, cache=None)
        self.chips: dict[int, str] = {}
        self._takes_cache, self._takes_shapes = takes_cache, takes_shapes

    def set_flag(self, flag: Any) -> None:
        self.flags.add(flag.name)

    def clear_flag(self, flag: Any) -> None:
        self.cleared.add(flag.name)

    def set_compute_capability(self, compute_capability: Any, index: int) -> None:
        assert index < self.num_compute_capabilities, "the number comes first"
        self.chips[index] = compute_capability.name

    def set_preview_feature(self, feature: Any, enable: bool) -> None:
        self.features[feature.name] = enable

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        self.pools[pool.name] = pool_size

    def add_optimization_profile(self, profile: Any) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1 if self._takes_shapes else -1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> Any:
        return SimpleNamespace(
            known=serialized_timing_cache, serialize=lambda: serialized_timing_cache + b"+"
        )

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        """Refuses one that has been filled elsewhere, where the settings are to."""
        if not ignore_mismatch and cache.known and not self._takes_cache:
            return False
        self.cache = cache
        return True

    def get_timing_cache(self) -> Any:
        return self.cache


class _Profile(SimpleNamespace):
    def set_shape(self, name: str, *bounds: tuple[int, ...]) -> None:
        setattr(self, name, bounds)


class _Layer(SimpleNamespace):
    def set_output_type(self, _: int, dtype: Any) -> None:
        self.output_type = dtype


class _Context(SimpleNamespace):
    """``refuses``: what the bindings do with a profile that TensorRT does not take."""

    def set_device_memory(self, memory: int, size: int) -> None:
        self.memory = (memory, size)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if self.refuses:
            raise RuntimeError("Error in set optimization profile async.")
        self.profile = (profile_index, stream_handle)
        return True


class _Made:
    """What a module of one version hands out, each behind that version's signatures."""

    def __init__(self, trt: Any, tag: str, behaviour: dict[str, bool]) -> None:
        self.trt, self.tag, self._behaviour = trt, tag, behaviour

    def does(self, what: str) -> bool:
        return self._behaviour.get(what, True)

    def strict(self, kind: str, made: Any) -> Any:
        return Strict(kind, self.tag, made)

    def start(self, logger: Any) -> None:
        """Constructors come through here: where CUDA does not start, the bindings know of a null
        pointer alone.
        """
        if not self.does("starts"):
            logger.log(self.trt.ILogger.ERROR, "CUDA initialization failure with error: 35")
            raise TypeError("pybind11::init(): factory function returned nullptr")

    def builder(self, logger: Any) -> Any:
        self.start(logger)
        return self.strict("Builder", _Builder(self, logger))

    def parser(self, network: Any, logger: Any) -> Any:
        del network, logger
        error = self.strict(
            "ParserError", SimpleNamespace(node=lambda: 3, desc=lambda: "no importer\nfor Foo")
        )

        def parse(model: bytes, path: str) -> bool:
            self.trt.seen.graphs.append(model)
            return self.does("parses") and bool(path)

        made = SimpleNamespace(parse=parse, num_errors=1, get_error=lambda _: error)
        return self.strict("OnnxParser", made)

    def runtime(self, logger: Any) -> Any:
        self.start(logger)

        def deserialize(serialized_engine: Any) -> Any:
            return self.engine() if bytes(serialized_engine) == b"plan" else None

        return self.strict("Runtime", SimpleNamespace(deserialize_cuda_engine=deserialize))

    def engine(self) -> Any:
        """An engine that wants 4096 bytes; its contexts are noted in ``seen.contexts`` with what
        they were made for.

        It has an input ``x`` HALF [batch, 4] of one to three rows in both of its profiles, and an
        output ``y`` like it.
        """
        inspector = SimpleNamespace(get_engine_information=lambda _: json.dumps({"Layers": LAYERS}))

        def context(strategy: Any = None) -> Any:
            made = _Context(strategy=strategy, refuses=not self.does("takes_profile"))
            made.is_stream_capturable = lambda _: self.does("captures")
            self.trt.seen.contexts.append(made)
            return self.strict("IExecutionContext", made)

        made = SimpleNamespace(
            create_engine_inspector=lambda: self.strict("EngineInspector", inspector),
            create_execution_context=context,
            create_execution_context_without_device_memory=context,
            create_runtime_config=lambda: self.strict("IRuntimeConfig", _RuntimeConfig(self)),
            device_memory_size=4096,
            device_memory_size_v2=4096,
            num_optimization_profiles=2,
            num_io_tensors=2,
            get_tensor_name=lambda index: "xy"[index],
            get_tensor_mode=lambda name: self.trt.TensorIOMode[
                "INPUT" if name == "x" else "OUTPUT"
            ],
            get_tensor_dtype=lambda _: SimpleNamespace(name="HALF"),
            get_tensor_shape=lambda _: (-1, 4),
            get_tensor_profile_shape=lambda _name, _profile: [(1, 4), (2, 4), (3, 4)],
        )
        return self.strict("ICudaEngine", made)

    def registry(self) -> Any:
        made = SimpleNamespace(
            get_creator=lambda *named: named, get_plugin_creator=lambda *named: named
        )
        return self.strict("IPluginRegistry", made)


class _RuntimeConfig(SimpleNamespace):
    """Its cache takes what begins with ``mine``, and then holds one kernel more."""

    def __init__(self, made: _Made) -> None:
        super().__init__(
            allocation=None, cache=None, dynamic_shapes_kernel_specialization_strategy=None
        )
        self._made = made

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.allocation = strategy.name

    def create_runtime_cache(self) -> Any:
        kernels = [b"mine"]

        def deserialize(blob: bytes) -> bool:
            taken = blob.startswith(b"mine")
            if taken:
                kernels[:] = [blob]
            return taken

        made = SimpleNamespace(
            kernels=kernels, deserialize=deserialize, serialize=lambda: b"".join(kernels)
        )
        self._made.trt.seen.caches.append(made)
        return self._made.strict("IRuntimeCache", made)

    def set_runtime_cache(self, cache: Any) -> bool:
        self.cache = cache
        return True


class _Builder:
    def __init__(self, made: _Made, logger: Any) -> None:
        self._made, self._logger = made, logger
        seen = made.trt.seen
        seen.builders.append(weakref.ref(self))
        alive = sum(builder() is not None for builder in seen.builders)
        seen.most_builders = max(seen.most_builders, alive)

    def create_network(self, flags: int) -> Any:
        trt = self._made.trt
        trt.seen.network = flags
        names = ["embeds_stream/Mul", "layers.0.mlp.gate_up/Gemm"]
        kinds = [trt.LayerType.ELEMENTWISE, trt.LayerType.MATRIX_MULTIPLY]
        trt.seen.layers = [
            _Layer(name=n, type=k, precision=None) for n, k in zip(names, kinds, strict=True)
        ]
        layers = [self._made.strict("ILayer", layer) for layer in trt.seen.layers]
        return self._made.strict(
            "INetworkDefinition", SimpleNamespace(num_layers=2, get_layer=layers.__getitem__)
        )

    def create_builder_config(self) -> Any:
        does = {name: self._made.does(name) for name in ("takes_cache", "takes_shapes")}
        self._made.trt.seen.settings = _Settings(**does)
        return self._made.strict("IBuilderConfig", self._made.trt.seen.settings)

    def create_optimization_profile(self) -> Any:
        return self._made.strict("IOptimizationProfile", _Profile())

    def build_serialized_network_to_stream(self, network: Any, config: Any, writer: Any) -> bool:
        plan = self.build_serialized_network(network, config)
        return plan is not None and writer.write(plan[:2]) + writer.write(plan[2:]) == len(plan)

    def build_serialized_network(self, network: Any, config: Any) -> Any:
        del network
        trt, settings = self._made.trt, self._made.trt.seen.settings
        if monitor := getattr(settings, "progress_monitor", None):
            monitor.phase_start("building", None, 4)
            for step in range(4):
                if step == 1 and not self._made.does("goes_on"):
                    os.kill(os.getpid(), signal.SIGINT)
                if not monitor.step_complete("building", step):
                    return None
            monitor.phase_finish("building")
        if hasattr(trt.PreviewFeature, _ALIASES) and not settings.features.get(_ALIASES):
            self._logger.log(
                trt.ILogger.ERROR, f"Aliased I/O used by a plugin but {_ALIASES} is off"
            )
            return None
        if not self._made.does("builds"):
            self._logger.log(trt.ILogger.ERROR, "4: no\nkernel fits")
        assert (config.get_timing_cache() is not None) is self._made.does("timed")
        if self._made.tag == RTX:
            for line in _rtx_log(trt.seen.layers_logged):
                self._logger.log(4, line)
        return b"plan" if self._made.does("builds") else None


def fake_tensorrt(version: str, **behaviour: bool) -> Any:
    """The module; ``module.seen`` has the last ``network`` flags, ``settings`` and ``layers``, all
    ``graphs``, and how many builders lived at once.

    Args:
        behaviour: what fails if False: ``starts``, ``parses``, ``builds``, ``goes_on`` (else Ctrl-C
            in a build), ``timed`` (else a build has no timing cache), ``takes_cache``,
            ``takes_shapes`` (of a profile, at build), ``takes_profile`` (of a context),
            ``captures`` (a context of TensorRT for RTX).
    """
    seen = SimpleNamespace(graphs=[], contexts=[], caches=[], layers_logged=RTX_LAYERS)
    seen.builders, seen.most_builders = [], 0
    trt = SimpleNamespace(__version__=version, float32="float32", float16="float16", seen=seen)
    tag = version_of(version)
    for kind in ENUMS:
        if names := members(kind, tag):
            setattr(trt, kind, IntEnum(kind, {name: i for i, name in enumerate(names)}))
    trt.ILogger = type("ILogger", (), {"ERROR": 1, "INTERNAL_ERROR": 0})
    for kind in ("IProgressMonitor", "IStreamWriter"):
        if members(kind, tag):
            setattr(trt, kind, type(kind, (), {}))
    made = _Made(trt, tag, behaviour)
    trt.Builder, trt.OnnxParser, trt.Runtime = made.builder, made.parser, made.runtime
    trt.get_plugin_registry = made.registry
    return trt
