"""Inputs and outputs of a TensorRT engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trt_eagle3.dtype import dtype_of_tensorrt
from trt_eagle3.errors import UserError
from trt_eagle3.spec import StateSpec

__all__ = ["Port", "check_states", "choose_profile", "engine_ports"]


@dataclass(frozen=True)
class Port:
    """An input or output of the engine.

    Attributes:
        shape: -1 for a variable size. ranges: smallest and largest shape in each profile; only for
            inputs.
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
        """Return whether ``profile`` was built for ``shape``."""
        low, high = self.ranges[profile]
        return all(lo <= size <= hi for lo, size, hi in zip(low, shape, high, strict=True))


def engine_ports(trt: Any, engine: Any) -> tuple[dict[str, Port], dict[str, Port]]:
    """Return inputs and outputs by name; ``trt`` is the module of ``engine``."""
    inputs, outputs = {}, {}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        dtype, shape = (
            dtype_of_tensorrt(engine.get_tensor_dtype(name).name).torch,
            tuple(engine.get_tensor_shape(name)),
        )
        if engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT:
            outputs[name] = Port(name, dtype, shape)
            continue
        bounds = [
            engine.get_tensor_profile_shape(name, p)
            for p in range(engine.num_optimization_profiles)
        ]
        inputs[name] = Port(
            name, dtype, shape, tuple((tuple(low), tuple(high)) for low, _, high in bounds)
        )
    return inputs, outputs


def choose_profile(
    inputs: Mapping[str, Port], shapes: Mapping[str, tuple[int, ...]], file: Path
) -> int:
    """Return the index of the first profile of the engine in ``file`` that fits all ``shapes``.

    Raises:
        UserError: no profile fits. The message names the input, the limit and what to change.
    """
    num_profiles = len(next(iter(inputs.values())).ranges)
    for profile in range(num_profiles):
        if all(inputs[name].fits(shape, profile) for name, shape in shapes.items()):
            return profile
    last = num_profiles - 1
    beyond_last = [n for n, shape in shapes.items() if not inputs[n].fits(shape, last)]
    beyond_all = [
        n for n in beyond_last if not any(inputs[n].fits(shapes[n], p) for p in range(last))
    ]
    candidates = beyond_all or beyond_last
    name = next((n for n in _COUNTED if n in candidates), candidates[0])
    raise UserError(_refusal(name, shapes[name], inputs[name].ranges[last], file))


# Vision inputs whose first axis is a count -> what it counts, and the number of extra entries.
_COUNTED = {"patches": ("patches", 0), "frame_starts": ("frames (padding included)", 1)}


def _refusal(
    name: str, shape: tuple[int, ...], bounds: tuple[tuple[int, ...], tuple[int, ...]], file: Path
) -> str:
    low, high = bounds
    if name in _COUNTED and shape[0] > high[0]:
        what, beyond = _COUNTED[name]
        return (
            f"{name}: {shape[0] - beyond} {what} at once, {file} was built for up to "
            f"{high[0] - beyond}. Send fewer or smaller images or fewer frames, or rebuild with a "
            "larger limits.max_visual_tokens."
        )
    return (
        f"{name}: {list(shape)} is outside what {file} was built for: {list(low)} to {list(high)}. "
        "Send less at once, or rebuild with larger limits or a larger engine.prefill_chunk."
    )


def check_states(states: Iterable[StateSpec], bound: Mapping[str, Tensor]) -> None:
    """Refuse a state whose input and output are not bound to one tensor: engines write into their
    inputs.

    From TensorRT 10.3 on they ignore the address of the output.
    """
    for state in states:
        ends = (state.name, state.output_name)
        places = [bound[end].data_ptr() if end in bound else None for end in ends]
        if places[0] is None or places[0] != places[1]:
            raise UserError(
                f"{state.output_name}: bind one tensor to it and to {state.name}: an engine "
                "updates its states in place"
            )
