"""Capabilities of each backend, as data: configs are checked and completed with it.

The objects that run the graphs are in ``engine/<backend>/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "ACTIVATIONS_BACKEND",
    "ALL_DTYPES",
    "SUPPORT",
    "TENSOR_PARALLEL_SIZES",
    "BackendSupport",
    "DeviceSupport",
]

ALL_DTYPES = ("float32", "float16", "bfloat16")
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)
"""Values of ``engine.tensor_parallel``."""


@dataclass(frozen=True)
class DeviceSupport:
    """Capabilities of a backend on one device.

    Attributes:
        batch_size: ``limits.max_batch_size`` if the config has none.
        activations: values of ``engine.activations`` besides ``compute``.
        defaults: fields of ``EngineConfig`` that differ from its own defaults on this device.
    """

    batch_size: int
    activations: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BackendSupport:
    """Capabilities of a backend.

    Attributes:
        devices: ``engine.device`` -> capabilities there.
        dtypes: values of ``engine.dtype``.
        compiles: whether TensorRT compiles its graphs, by ``engine.tensorrt``.
        has_ranks: whether several devices can share a target (``engine.tensor_parallel``).
        float32_residual: compute types whose residual stream may be float32, and is by default.
        defaults: fields of ``EngineConfig`` that differ from its own defaults.
    """

    devices: Mapping[str, DeviceSupport]
    dtypes: tuple[str, ...] = ALL_DTYPES
    compiles: bool = False
    has_ranks: bool = False
    float32_residual: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def fill(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the unchecked values ``given`` of an ``EngineConfig`` with this backend's
        defaults.
        """
        values = {**self.defaults, **given}
        for name, device in self.devices.items():
            if values.get("device") == name:
                values = {**device.defaults, **values}
        if values.get("dtype") in self.float32_residual:
            values.setdefault("residual", "float32")
        return values


_CPU_BATCH_SIZE = 8  # each further sequence costs time on a CPU

SUPPORT: Mapping[str, BackendSupport] = {
    "onnxruntime": BackendSupport(
        devices={"cpu": DeviceSupport(_CPU_BATCH_SIZE, activations=("int8",))},
        dtypes=("float32",),
    ),
    "torch": BackendSupport(
        devices={
            "cpu": DeviceSupport(_CPU_BATCH_SIZE),
            # long prompt chunks and many sequences keep a GPU busy
            "cuda": DeviceSupport(64, ("fp8", "int8"), defaults={"prefill_chunk": 4096}),
        },
        has_ranks=True,
    ),
    "tensorrt": BackendSupport(
        # fewer than the GPU could run: an engine reserves memory for as many prompt chunks
        devices={"cuda": DeviceSupport(16)},
        compiles=True,
        float32_residual=("float16",),
        defaults={"device": "cuda", "dtype": "float16"},
    ),
}
"""Capabilities by ``engine.backend``. ``tensorrt_config`` lists the quantised weights that
TensorRT engines hold.
"""

ACTIVATIONS_BACKEND = {"int8": "backend: onnxruntime", "fp8": "backend: torch on device: cuda"}
"""Rounded activations -> the backend that a refusal recommends."""
