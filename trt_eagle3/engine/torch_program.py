"""A graph made ready for torch: weights loaded, what depends on weights alone computed, lifetimes known."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from trt_eagle3.engine import capi
from trt_eagle3.engine.torch_ops import OWN_OPS, STANDARD_OPS, TORCH_TYPES, Function
from trt_eagle3.errors import UserError
from trt_eagle3.graph.ops import DOMAIN

__all__ = ["Program", "ReadWeight", "Step", "load_program"]

ReadWeight = Callable[[onnx.TensorProto, Path], Tensor]
"""Makes the tensor of an initializer; the path is the weights root."""


@dataclass(frozen=True)
class Step:
    """One node: what it computes, from what, into what, and which values nothing after it needs."""

    function: Function
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    done_with: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """What a session runs.

    Attributes:
        inputs: declared type of each input. outputs: names, taps included.
        constants: weights and what was computed from them, on the device.
    """

    inputs: Mapping[str, onnx.TypeProto.Tensor]
    outputs: tuple[str, ...]
    constants: Mapping[str, Tensor]
    steps: tuple[Step, ...]


def load_program(
    model: Path, weights_root: Path, taps: Sequence[str], device: torch.device, read_weight: ReadWeight | None = None
) -> Program:
    """Read the graph at ``model``; ``taps`` are intermediate tensors wanted among the outputs.

    Raises:
        UserError: an unreadable model or weight file, a tap that the graph lacks, an op that has no torch function.
    """
    proto = _load(model)
    known = {name for node in proto.graph.node for name in node.output}
    for name in taps:
        if name not in known:
            raise UserError(f"{model}: the graph has no tensor {name}")
    outputs = (*(o.name for o in proto.graph.output), *taps)
    read = read_weight or _read_weight
    values = {i.name: _on_device(read(i, weights_root), device) for i in proto.graph.initializer}
    steps = [_step(node, device) for node in proto.graph.node]
    if device.type == "cuda" and capi.available():
        steps = fuse_silu_mul(steps, set(outputs))
    constants, steps = _fold(values, steps)
    inputs = {i.name: i.type.tensor_type for i in proto.graph.input}
    return Program(inputs, outputs, constants, tuple(_with_lifetimes(steps, {*outputs, *constants})))


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
        raw = np.memmap(file, dtype=np.uint8, mode="c", offset=int(place["offset"]), shape=(num_bytes,))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot map {proto.name}: {error}. Rebuild the bundle.") from error
    return torch.from_numpy(raw).view(TORCH_TYPES[proto.data_type]).view(list(proto.dims))


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """int64 tensors are shapes and indices: they stay on the CPU."""
    return tensor if tensor.dtype == torch.int64 else tensor.to(device)


def _step(node: onnx.NodeProto, device: torch.device) -> Step:
    functions = _own_ops(device.type) if node.domain == DOMAIN else STANDARD_OPS
    if node.op_type not in functions:
        raise UserError(f"{node.name}: the torch session does not know op {node.op_type}")
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return Step(functions[node.op_type], tuple(node.input), tuple(node.output), attributes)


@cache
def _own_ops(device: str) -> Mapping[str, Function]:
    """Our ops on ``device``: the kernels where they can run, else stock operations with one warning."""
    if device != "cuda":
        return OWN_OPS
    if not capi.available():
        warnings.warn(
            "our CUDA kernels were not found: TreeAttention runs through torch's own attention, many times slower. "
            f"Build them (make plugins), or name the library in {capi.LIBRARY_VARIABLE}.",
            stacklevel=2,
        )
        return OWN_OPS
    return {
        "AddRmsNorm": _kernel_add_rms_norm,
        "QKNormMRope": capi.qk_norm_mrope,
        "TreeAttention": _kernel_tree_attention,
        "PickRows": OWN_OPS["PickRows"],
    }


def _kernel_add_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None, *, epsilon: float) -> Any:
    y, total = capi.add_rms_norm(x, weight, residual, epsilon=epsilon)
    return y if residual is None else (y, total)


def _kernel_tree_attention(*inputs: Tensor, page_size: int, scale: float, **geometry: int) -> Any:
    """Geometry (head counts) is in the tensors' shapes already."""
    del geometry
    return capi.tree_attention(*inputs, page_size=page_size, scale=scale), inputs[3], inputs[4]


def fuse_silu_mul(steps: list[Step], kept: set[str]) -> list[Step]:
    """Replace the four nodes of ``silu(gate) * up`` over one packed projection by our kernel."""
    users: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        for name in step.inputs:
            users[name].append(step)
    replaced: dict[int, Step | None] = {}
    for split in steps:
        if split.function is not STANDARD_OPS["Split"] or len(split.outputs) != 2:
            continue
        gate, up = split.outputs
        chain = _silu_chain(users, gate, up)
        if chain and not kept & {name for step in (split, *chain[:-1]) for name in step.outputs}:
            replaced |= {id(step): None for step in (split, *chain)}
            replaced[id(chain[-1])] = Step(capi.silu_mul, split.inputs[:1], chain[-1].outputs, {})
    return [new for step in steps if (new := replaced.get(id(step), step)) is not None]


def _silu_chain(users: Mapping[str, list[Step]], gate: str, up: str) -> list[Step] | None:
    """Sigmoid(gate), Mul(gate, that), Mul(that, up), where the graph has just these."""
    sigmoid, *mul = sorted(users[gate], key=lambda step: step.function is not STANDARD_OPS["Sigmoid"])
    if sigmoid.function is not STANDARD_OPS["Sigmoid"] or len(mul) != 1 or len(users[up]) != 1:
        return None
    last = users[up][0]
    silu = mul[0]
    multiplies = all(step.function is STANDARD_OPS["Mul"] for step in (silu, last))
    fits = silu.inputs == (gate, sigmoid.outputs[0]) and last.inputs == (silu.outputs[0], up)
    return [sigmoid, silu, last] if multiplies and fits else None


def _fold(values: dict[str, Tensor], steps: list[Step]) -> tuple[dict[str, Tensor], list[Step]]:
    """Compute once what depends on weights alone (fused projections, casts), and let the parts go."""
    rest = []
    for step in steps:
        if all(name in values for name in step.inputs):
            found = step.function(*(values[name] for name in step.inputs), **step.attributes)
            values.update(zip(step.outputs, found if isinstance(found, tuple) else (found,), strict=True))
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
