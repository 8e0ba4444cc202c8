"""As much of TensorRT's Python API as a build calls; it notes what it is asked for and builds nothing."""

from __future__ import annotations

import json
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

__all__ = ["fake_tensorrt"]

KINDS = ["ACTIVATION", "ELEMENTWISE", "UNARY", "REDUCE", "SOFTMAX", "MATRIX_MULTIPLY", "NORMALIZATION", "PLUGIN"]
LAYERS = [
    {"Name": "layers.0.input_layernorm/AddRmsNorm", "LayerType": "PluginV2"},
    {"Name": "layers.0.mlp.gate_up/Gemm", "LayerType": "CaskGemmConvolution"},
]


def _enum(name: str, *members: str) -> Any:
    return IntEnum(name, {member: i for i, member in enumerate(members)})


class _Settings(SimpleNamespace):
    def __init__(self) -> None:
        super().__init__(flags=set(), cleared=set(), features={}, profiles=[], pools={}, cache=b"")

    def set_flag(self, flag: Any) -> None:
        self.flags.add(flag.name)

    def clear_flag(self, flag: Any) -> None:
        self.cleared.add(flag.name)

    def set_preview_feature(self, feature: Any, on: bool) -> None:
        self.features[feature.name] = on

    def set_memory_pool_limit(self, pool: Any, num_bytes: int) -> None:
        self.pools[pool.name] = num_bytes

    def add_optimization_profile(self, profile: Any) -> None:
        self.profiles.append(profile)

    def create_timing_cache(self, known: bytes) -> Any:
        return SimpleNamespace(serialize=lambda: known + b"+")

    def set_timing_cache(self, cache: Any, _: bool) -> None:
        self.cache = cache

    def get_timing_cache(self) -> Any:
        return self.cache


class _Profile(SimpleNamespace):
    def set_shape(self, name: str, *bounds: tuple[int, ...]) -> None:
        setattr(self, name, bounds)


class _Layer(SimpleNamespace):
    def get_output(self, _: int) -> Any:
        return SimpleNamespace(dtype="float32")

    def set_output_type(self, _: int, dtype: Any) -> None:
        self.output_type = dtype


def fake_tensorrt(version: str, *, parses: bool = True, builds: bool = True) -> Any:
    """The module; ``module.seen`` has the last ``network`` flags, ``settings`` and ``layers``, and all ``graphs``."""
    trt = SimpleNamespace(__version__=version, float32="float32", float16="float16", seen=SimpleNamespace(graphs=[]))
    trt.LayerType = _enum("LayerType", *KINDS)
    trt.NetworkDefinitionCreationFlag = _enum("NetworkDefinitionCreationFlag", "EXPLICIT_BATCH", "STRONGLY_TYPED")
    trt.BuilderFlag = _enum("BuilderFlag", "TF32", "FP16", "OBEY_PRECISION_CONSTRAINTS", "REFIT", "STRIP_PLAN")
    trt.PreviewFeature = _enum("PreviewFeature", "PROFILE_SHARING_0806")
    trt.MemoryPoolType = _enum("MemoryPoolType", "WORKSPACE")
    trt.ProfilingVerbosity = _enum("ProfilingVerbosity", "DETAILED")
    trt.LayerInformationFormat = _enum("LayerInformationFormat", "JSON")
    trt.ILogger = type("ILogger", (), {"ERROR": 1, "INTERNAL_ERROR": 0})
    if int(version.split(".", maxsplit=1)[0]) >= 10:
        trt.IProgressMonitor = type("IProgressMonitor", (), {})

    class Builder:
        def __init__(self, logger: Any) -> None:
            self._logger = logger

        def create_network(self, flags: int) -> Any:
            trt.seen.network = flags
            names = ["embeds_stream/Mul", "layers.0.mlp.gate_up/Gemm"]
            kinds = [trt.LayerType.ELEMENTWISE, trt.LayerType.MATRIX_MULTIPLY]
            trt.seen.layers = [_Layer(name=n, type=k, precision=None) for n, k in zip(names, kinds, strict=True)]
            return SimpleNamespace(num_layers=2, get_layer=trt.seen.layers.__getitem__)

        def create_builder_config(self) -> Any:
            trt.seen.settings = _Settings()
            return trt.seen.settings

        def create_optimization_profile(self) -> Any:
            return _Profile()

        def build_serialized_network(self, _network: Any, settings: Any) -> Any:
            if monitor := getattr(settings, "progress_monitor", None):
                monitor.phase_start("building", None, 4)
                monitor.step_complete("building", 2)
                monitor.phase_finish("building")
            if not builds:
                self._logger.log(trt.ILogger.ERROR, "4: no\nkernel fits")
            return b"plan" if builds else None

    error = SimpleNamespace(node=lambda: 3, desc=lambda: "no importer\nfor Foo")
    trt.Builder = Builder

    def parse(data: bytes, path: str) -> bool:
        trt.seen.graphs.append(data)
        return parses and bool(path)

    trt.OnnxParser = lambda _network, _logger: SimpleNamespace(parse=parse, num_errors=1, get_error=lambda _: error)
    information = json.dumps({"Layers": LAYERS})
    inspector = SimpleNamespace(get_engine_information=lambda _: information)
    engine = SimpleNamespace(create_engine_inspector=lambda: inspector, device_memory_size=4096)
    trt.Runtime = lambda _: SimpleNamespace(deserialize_cuda_engine=lambda plan: engine if plan == b"plan" else None)
    return trt
