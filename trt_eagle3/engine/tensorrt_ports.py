"""The inputs and outputs of a TensorRT engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trt_eagle3.engine.tensorrt_versions import tensorrt
from trt_eagle3.errors import UserError

__all__ = ["Port", "check_caches", "engine_ports"]

_TYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Port:
    """An input or output of the engine.

    Attributes:
        shape: -1 where it may vary. ranges: smallest and largest shape in each profile; inputs have them.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    ranges: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()

    def check(self, tensor: Tensor) -> None:
        same = len(self.shape) == tensor.ndim and all(
            e in {-1, a} for e, a in zip(self.shape, tensor.shape, strict=True)
        )
        if not same or self.dtype != tensor.dtype:
            got = f"{tensor.dtype} {list(tensor.shape)}"
            raise UserError(f"{self.name}: expected {self.dtype} {list(self.shape)}, got {got}")

    def fits(self, shape: tuple[int, ...], profile: int) -> bool:
        """Whether ``profile`` was built for ``shape``."""
        low, high = self.ranges[profile]
        return all(lo <= size <= hi for lo, size, hi in zip(low, shape, high, strict=True))


def engine_ports(engine: Any) -> tuple[dict[str, Port], dict[str, Port]]:
    """Inputs and outputs by name."""
    trt = tensorrt()
    inputs, outputs = {}, {}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        dtype, shape = _TYPES[engine.get_tensor_dtype(name).name], tuple(engine.get_tensor_shape(name))
        if engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT:
            outputs[name] = Port(name, dtype, shape)
            continue
        bounds = [engine.get_tensor_profile_shape(name, p) for p in range(engine.num_optimization_profiles)]
        inputs[name] = Port(name, dtype, shape, tuple((tuple(low), tuple(high)) for low, _, high in bounds))
    return inputs, outputs


def check_caches(outputs: Iterable[str], bound: Mapping[str, Tensor]) -> None:
    """Refuse a cache whose input and output are not bound to one tensor: engines write into what they are given.

    From TensorRT 10.3 on they write nowhere else, whatever address the output has.
    """
    for name in outputs:
        source = name.replace("_cache_out.", "_cache.")
        if source == name:
            continue
        places = [bound[end].data_ptr() if end in bound else None for end in (source, name)]
        if places[0] is None or places[0] != places[1]:
            raise UserError(f"{name}: bind one tensor to it and to {source}: an engine updates its caches in place")
