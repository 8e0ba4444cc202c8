"""What differs between TensorRT 8.6, 10 and 11, and between machines; the one place that imports
``tensorrt``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from importlib import import_module
from typing import Any

from trt_eagle3.config import EngineConfig
from trt_eagle3.errors import EnvironmentMissingError, UserError

__all__ = [
    "allow_aliases",
    "check_dtype",
    "configure_types",
    "create_network",
    "device_bytes",
    "find_creator",
    "major",
    "new_context",
    "read_weights",
    "show_progress",
    "strip_weights",
    "tensorrt",
    "uses_linear",
]

OLDEST = (8, 6)


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
            f"TensorRT: {reason}. Install it: pip install tensorrt, or use NVIDIA's TensorRT "
            "container."
        ) from error
    if tuple(map(int, module.__version__.split(".")[:2])) < OLDEST:
        raise EnvironmentMissingError(
            f"TensorRT {module.__version__}: 8.6, 10.x or 11.x is needed. Upgrade tensorrt."
        )
    return module


def major() -> int:
    """TensorRT's major version."""
    return int(tensorrt().__version__.split(".")[0])


def check_dtype(dtype: str) -> None:
    """Refuse a compute type that this TensorRT lacks."""
    if dtype == "bfloat16" and major() < 10:
        raise UserError(
            f"engine.dtype: bfloat16 needs TensorRT 10 or later, this is {tensorrt().__version__}. "
            "Use float16, or upgrade."
        )


def uses_linear(config: EngineConfig) -> bool:
    """Whether products with a 16-bit weight go to our plugin: ``engine.tensorrt.linear``.

    TensorRT 8.6 runs them as convolutions between layout copies; later versions have products of
    their own.
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
    """Make the builder keep the graph's types: on 10 and later the network says so, on 8.6 layer by
    layer.

    8.6 is free to compute any layer of a float16 network in half. Those of ``wide``, the names of
    nodes that the graph computes in float32 (rope angles, the wide residual), must not be. The
    other layers are left free: their tensors say float32 there whatever the graph says, and holding
    them to that makes matrix products take twice the memory.
    """
    trt = tensorrt()
    config.clear_flag(trt.BuilderFlag.TF32)  # on by default; it rounds to ten bits
    if major() >= 10:
        return
    # always so later: a context per graph
    config.set_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806, True)
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


_COMPUTING = (
    "ACTIVATION",
    "ELEMENTWISE",
    "UNARY",
    "REDUCE",
    "SOFTMAX",
    "MATRIX_MULTIPLY",
    "NORMALIZATION",
)


def allow_aliases(config: Any) -> None:
    """Let plugins write into their inputs, as ours say from 10.3 on that they do; else the
    builder refuses them.
    """
    trt = tensorrt()
    feature = getattr(trt.PreviewFeature, "ALIASED_PLUGIN_IO_10_03", None)
    if major() >= 10 and feature is not None:
        config.set_preview_feature(feature, True)


def strip_weights(config: Any) -> None:
    """Make engines without their weights."""
    trt = tensorrt()
    if major() < 10:
        raise UserError(
            f"engine.tensorrt.strip_weights needs TensorRT 10 or later, this is {trt.__version__}."
        )
    config.set_flag(trt.BuilderFlag.STRIP_PLAN)


def device_bytes(engine: Any) -> int:
    """Device memory that a context of ``engine`` wants for activations, whatever its profile."""
    wanted = getattr(engine, "device_memory_size_v2", None)  # from 10.1 on; 11 has no other
    return int(engine.device_memory_size if wanted is None else wanted)


def new_context(engine: Any, address: int, num_bytes: int, profile: int, stream: int) -> Any | None:
    """A context in ``profile`` whose activations lie in ``num_bytes`` at ``address``; None where
    TensorRT refuses.

    Args:
        stream: what sets the profile, and must have run before the context does.
    """
    if major() < 10:
        context = engine.create_execution_context_without_device_memory()
    else:
        context = engine.create_execution_context(
            tensorrt().ExecutionContextAllocationStrategy.USER_MANAGED
        )
    if context is None:
        return None
    if major() >= 10 and hasattr(context, "set_device_memory"):  # from 10.1 on
        context.set_device_memory(address, num_bytes)
    else:
        context.device_memory = address
    try:
        return context if context.set_optimization_profile_async(profile, stream) else None
    except RuntimeError:  # how its bindings tell of a refusal
        return None


def find_creator(plugin: str, version: str) -> Any | None:
    """The creator of ``plugin`` in TensorRT's registry."""
    registry = tensorrt().get_plugin_registry()
    # 8.6 has no other, 11 has not that
    find = getattr(registry, "get_creator", None) or registry.get_plugin_creator
    return find(plugin, version, "")


def read_weights(refitter: Any, parser: Any, onnx_file: str) -> bool:
    """Put the weights of an ONNX file into a stripped engine; false where TensorRT refuses.

    TensorRT 10 and later.
    """
    return bool(parser.refit_from_file(onnx_file) and refitter.refit_cuda_engine())


def show_progress(config: Any, show: Callable[[str], object], stop: Callable[[], bool]) -> None:
    """Have the builder tell ``show`` how far its outermost phase is, and end when it must
    ``stop``; from 10 on.
    """
    trt = tensorrt()
    if not hasattr(trt, "IProgressMonitor"):
        return

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self._steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            if total := self._steps.get(phase_name):  # ``step`` is done, and the first is 0
                show(f"{phase_name}, {100 * (step + 1) // total} %")
            return not stop()

        def phase_finish(self, phase_name: str) -> None:
            self._steps.pop(phase_name, None)

    config.progress_monitor = Monitor()
