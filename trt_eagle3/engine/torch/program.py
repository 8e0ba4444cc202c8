"""A graph made ready for torch: weights loaded, what depends on weights alone computed,
lifetimes known.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from trt_eagle3.engine.torch import capi
from trt_eagle3.engine.torch.fusion import Step, fused, gemm, layer_norm
from trt_eagle3.engine.torch.ops import STANDARD_OPS, TORCH_TYPES, Function
from trt_eagle3.errors import UserError
from trt_eagle3.graph.ops import DOMAIN, PLUGINS
from trt_eagle3.graph.states import read_states
from trt_eagle3.spec import StateSpec

__all__ = ["Program", "ReadWeight", "Step", "load_program"]

ReadWeight = Callable[[onnx.TensorProto, Path], Tensor]
"""Makes the tensor of an initializer; the path is the weights root."""


@dataclass(frozen=True)
class Program:
    """What a session runs.

    Attributes:
        inputs: declared type of each input. outputs: names, intermediates included.
        constants: weights and what was computed from them, on the device.
        states: what the graph's layers keep between runs.
    """

    inputs: Mapping[str, onnx.TypeProto.Tensor]
    outputs: tuple[str, ...]
    constants: Mapping[str, Tensor]
    steps: tuple[Step, ...]
    states: tuple[StateSpec, ...]


def load_program(
    model: Path,
    weights_root: Path,
    intermediates: Sequence[str],
    device: torch.device,
    read_weight: ReadWeight | None = None,
) -> Program:
    """Read the graph at ``model``; ``intermediates`` are intermediate tensors wanted among the
    outputs.

    Raises:
        UserError: an unreadable model or weight file, a tap that the graph lacks, an op that has no
            torch function.
    """
    proto = _load(model)
    known = {name for node in proto.graph.node for name in node.output}
    for name in intermediates:
        if name not in known:
            raise UserError(f"{model}: the graph has no tensor {name}")
    outputs = (*(o.name for o in proto.graph.output), *intermediates)
    read = read_weight or _read_weight
    values = {i.name: _on_device(read(i, weights_root), device) for i in proto.graph.initializer}
    steps = [_step(node, device) for node in proto.graph.node]
    constants, steps = _fold(values, steps)
    if device.type == "cuda" and capi.available():
        steps = fused(steps, kept={*outputs})
    inputs = {i.name: i.type.tensor_type for i in proto.graph.input}
    return Program(
        inputs,
        outputs,
        constants,
        tuple(_with_lifetimes(steps, {*outputs, *constants})),
        read_states(proto),
    )


def _load(model: Path) -> onnx.ModelProto:
    try:
        return onnx.load(model, load_external_data=False)
    except Exception as error:  # protobuf's own errors have no base class but Exception
        reason = " ".join(str(error).split())
        raise UserError(f"{model}: cannot load it: {reason}. Rebuild the bundle.") from error


def _read_weight(proto: onnx.TensorProto, root: Path) -> Tensor:
    """An initializer, from the model or mapped from its file."""
    if proto.data_location != onnx.TensorProto.EXTERNAL:
        return torch.from_numpy(numpy_helper.to_array(proto).copy())
    place = {entry.key: entry.value for entry in proto.external_data}
    file, num_bytes = root / place["location"], int(place["length"])
    try:
        # mode c: copy on write, so that torch may call the memory its own
        raw = np.memmap(
            file, dtype=np.uint8, mode="c", offset=int(place["offset"]), shape=(num_bytes,)
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot map {proto.name}: {error}. Rebuild the bundle.") from error
    return torch.from_numpy(raw).view(TORCH_TYPES[proto.data_type]).view(list(proto.dims))


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """int64 tensors are shapes and indices: they stay on the CPU."""
    return tensor if tensor.dtype == torch.int64 else tensor.to(device)


def _step(node: onnx.NodeProto, device: torch.device) -> Step:
    functions = _own_ops(device.type) if node.domain == DOMAIN else _standard_ops(device.type)
    if node.op_type not in functions:
        raise UserError(f"{node.name}: the torch session does not know op {node.op_type}")
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return Step(functions[node.op_type], tuple(node.input), tuple(node.output), attributes)


@cache
def _standard_ops(device: str) -> Mapping[str, Function]:
    return (
        {**STANDARD_OPS, "Gemm": gemm, "LayerNormalization": layer_norm}
        if device == "cuda" and capi.available()
        else STANDARD_OPS
    )


@cache
def _own_ops(device: str) -> Mapping[str, Function]:
    """Our ops on ``device``: the kernels where they can run, else stock operations with one
    warning.
    """
    stock = {name: op.torch_function for name, op in PLUGINS.items()}
    if device != "cuda":
        return stock
    if not capi.available():
        warnings.warn(
            "our CUDA kernels were not found: attention runs through torch's own, many times "
            f"slower. Build them (make plugins), or name the library in {capi.LIBRARY_VARIABLE}.",
            stacklevel=2,
        )
        return stock
    calls = {name: op.kernel_call for name, op in PLUGINS.items()}
    return {**stock, **{name: capi.launched(call) for name, call in calls.items() if call}}


def _fold(values: dict[str, Tensor], steps: list[Step]) -> tuple[dict[str, Tensor], list[Step]]:
    """Compute once what depends on weights alone (fused projections, casts), and let the parts
    go.
    """
    rest = []
    for step in steps:
        if all(name in values for name in step.inputs):
            found = step.function(*(values[name] for name in step.inputs), **step.attributes)
            values.update(
                zip(step.outputs, found if isinstance(found, tuple) else (found,), strict=True)
            )
        else:
            rest.append(step)
    needed = {name for step in rest for name in step.inputs}
    return {name: value for name, value in values.items() if name in needed}, rest


def _with_lifetimes(steps: list[Step], kept: set[str]) -> list[Step]:
    """Each step with the values it is the last to need, so that they can be freed."""
    last = {name: i for i, step in enumerate(steps) for name in (*step.outputs, *step.inputs)}
    ends: list[list[str]] = [[] for _ in steps]
    made = {name for step in steps for name in step.outputs}
    for name, i in last.items():
        if name in made and name not in kept:
            ends[i].append(name)
    return [replace(step, done_with=tuple(done)) for step, done in zip(steps, ends, strict=True)]
