"""Prepare a graph for torch: load weights, compute the lifetimes of values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from trt_eagle3.engine import capi
from trt_eagle3.engine.kernels.libraries import INSTALL_KERNELS
from trt_eagle3.engine.runtime.collectives import Collectives
from trt_eagle3.engine.runtime.weights import materialise
from trt_eagle3.engine.torch.fusion import Step, fused, gemm, layer_norm
from trt_eagle3.engine.torch.moe import Experts, fused_moe, pack_experts
from trt_eagle3.engine.torch.ops import STANDARD_OPS, Function
from trt_eagle3.engine.torch.pack import pack
from trt_eagle3.engine.torch.packed import PackedWeight, warn_of_unrounded
from trt_eagle3.engine.torch.prompt_attention import prompt_attention
from trt_eagle3.engine.torch.prompt_nodes import PROMPT_ATTENTION, prompt_nodes
from trt_eagle3.engine.torch.recurrent import gated_delta
from trt_eagle3.errors import UserError
from trt_eagle3.graph.activations import read_activations
from trt_eagle3.graph.ops import DOMAIN, EVERY_OP
from trt_eagle3.graph.shard import shard_graph
from trt_eagle3.graph.states import read_states
from trt_eagle3.graph.weights import WeightExpr, external_weights
from trt_eagle3.spec import StateSpec

__all__ = [
    "Program",
    "ReadWeight",
    "Step",
    "Values",
    "Weight",
    "compute",
    "computed",
    "load_program",
    "only_factors",
    "with_lifetimes",
]

Weight = Tensor | PackedWeight | Experts
ReadWeight = Callable[[WeightExpr, Path, torch.device], Weight]
"""Makes a weight's tensor on the device; the path is the weights root."""
Values = dict[str, Any]
"""Values of a forward, by name."""


@dataclass(frozen=True)
class Program:
    """What a session runs.

    Attributes:
        inputs: declared type of each input. outputs: names, intermediates included.
        constants: weights and small constants, on the device. Quantised weights that only products
            read are packed there.
        states: layer states that the graph keeps between runs.
        prompt_steps: ``steps`` for a prompt's chunk (``prompt_nodes``); None if there are none.
    """

    inputs: Mapping[str, onnx.TypeProto.Tensor]
    outputs: tuple[str, ...]
    constants: Mapping[str, Weight]
    steps: tuple[Step, ...]
    states: tuple[StateSpec, ...]
    prompt_steps: tuple[Step, ...] | None


def load_program(
    model: Path,
    weights_root: Path,
    intermediates: Sequence[str],
    device: torch.device,
    read_weight: ReadWeight | None = None,
    collectives: Collectives | None = None,
) -> Program:
    """Read the graph at ``model``; ``intermediates`` are added to its outputs.

    ``collectives``: exchanges between ranks; the program is then that of one rank.

    Raises:
        UserError: the model or a weight file cannot be read, the graph lacks an intermediate, or an
            op has no torch function.
    """
    proto = _load(model)
    known = {name for node in proto.graph.node for name in node.output}
    for name in intermediates:
        if name not in known:
            raise UserError(f"{model}: the graph has no tensor {name}")
    outputs = (*(o.name for o in proto.graph.output), *intermediates)
    weights = _weights(model, proto)
    if collectives is not None:
        proto, weights = shard_graph(proto, weights, collectives.shard)
    constants: dict[str, Weight] = {**_constants(proto, device)}
    factors = only_factors(proto)
    activations = read_activations(proto)
    read_factor = partial(_read_factor, activations=activations)
    if read_weight is None and _packs(device):
        constants.update(_packed_experts(proto, weights, weights_root, device, activations))
    for name, expr in weights.items():
        if name not in constants:
            read = read_weight or (read_factor if name in factors else _read_weight)
            constants[name] = read(expr, weights_root, device)
    packed = {n: w for n, w in constants.items() if isinstance(w, PackedWeight)}
    if packed:
        warn_of_unrounded(activations)
    prompt = prompt_nodes(proto.graph.node, constants, outputs)
    kept = {*outputs, *constants}
    bytes_ = {n for n, w in packed.items() if w.takes_bytes}
    inputs = {i.name: i.type.tensor_type for i in proto.graph.input}
    return Program(
        inputs,
        outputs,
        constants,
        _steps(proto.graph.node, device, kept, bytes_, collectives),
        read_states(proto),
        None if prompt is None else _steps(prompt, device, kept, bytes_, collectives),
    )


def _steps(
    nodes: Sequence[onnx.NodeProto],
    device: torch.device,
    kept: set[str],
    byte_weights: set[str],
    collectives: Collectives | None,
) -> tuple[Step, ...]:
    """Return the steps for ``nodes``; ``kept`` values stay. ``byte_weights``: see ``fused``."""
    read = kept.union(*(node.input for node in nodes))
    own = _own_ops(device.type)
    if collectives is not None:
        exchanges = {"AllReduce": collectives.all_reduce, "AllGather": collectives.all_gather}
        own = {**own, **exchanges}
    steps = [_step(node, device, read, own) for node in nodes]
    if _packs(device):
        steps = fused(steps, kept, byte_weights)
    return tuple(with_lifetimes(steps, kept))


def _load(model: Path) -> onnx.ModelProto:
    try:
        return onnx.load(model, load_external_data=False)
    except MemoryError:
        raise
    except Exception as error:  # protobuf's own errors have no base class but Exception
        reason = " ".join(str(error).split())
        raise UserError(f"{model}: cannot load it: {reason}. Rebuild the bundle.") from error


def _weights(model: Path, proto: onnx.ModelProto) -> dict[str, WeightExpr]:
    try:
        return external_weights(proto)
    except UserError as error:
        raise UserError(f"{model}: {error}. Rebuild the bundle.") from error


def only_factors(proto: onnx.ModelProto) -> set[str]:
    """Return the values that are only used as the weight of products without a bias."""
    factors: set[str] = set()
    others = {output.name for output in proto.graph.output}
    for node in proto.graph.node:
        product = node.op_type == "Gemm" and len(node.input) == 2 and not node.domain
        transposed = any(a.name == "transB" and a.i == 1 for a in node.attribute)
        for place, name in enumerate(node.input):
            (factors if product and transposed and place == 1 else others).add(name)
    return factors - others


def _packed_experts(
    proto: onnx.ModelProto,
    weights: Mapping[str, WeightExpr],
    root: Path,
    device: torch.device,
    activations: str,
) -> dict[str, Weight]:
    """Pack the experts of each layer whose two weights have a form that the kernels support."""
    made: dict[str, Weight] = {}
    for node in proto.graph.node:
        if node.op_type != "FusedMoe" or node.domain != DOMAIN:
            continue
        names = tuple(node.input[2:4])
        exprs = (weights[names[0]], weights[names[1]])
        packed = pack_experts(exprs, root, device, activations=activations)
        made |= zip(names, packed or (), strict=False)
    return made


def _packs(device: torch.device) -> bool:
    """Whether kernels for quantised weights are available."""
    return device.type == "cuda" and capi.available()


def _read_factor(expr: WeightExpr, root: Path, device: torch.device, *, activations: str) -> Weight:
    """Read a weight, packed if kernels support its form."""
    packed = pack(expr, root, device, activations=activations) if _packs(device) else None
    return _read_weight(expr, root, device) if packed is None else packed


def _read_weight(expr: WeightExpr, root: Path, device: torch.device) -> Tensor:
    return materialise(expr, root, expr.dtype, device)


def _constants(proto: onnx.ModelProto, device: torch.device) -> dict[str, Tensor]:
    """Return the model's own constants. int64 tensors (shapes, indices) stay on the CPU."""
    inside = (p for p in proto.graph.initializer if p.data_location != TensorProto.EXTERNAL)
    made = {p.name: torch.from_numpy(numpy_helper.to_array(p).copy()) for p in inside}
    return {n: t if t.dtype == torch.int64 else t.to(device) for n, t in made.items()}


def _step(
    node: onnx.NodeProto, device: torch.device, read: set[str], own: Mapping[str, Function]
) -> Step:
    """Return the step of ``node``.

    ``read``: values that are read anywhere. ``own``: functions of our ops.
    """
    functions = own if node.domain == DOMAIN else _standard_ops(device.type)
    if node.op_type not in functions:
        raise UserError(f"{node.name}: the torch session does not support op {node.op_type}")
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "TreeAttention" and node.output[0] not in read:
        attributes["write_only"] = True
    return Step(
        functions[node.op_type], tuple(node.input), tuple(node.output), attributes, op=node.op_type
    )


@cache
def _standard_ops(device: str) -> Mapping[str, Function]:
    return (
        {**STANDARD_OPS, "Gemm": gemm, "LayerNormalization": layer_norm}
        if device == "cuda" and capi.available()
        else STANDARD_OPS
    )


@cache
def _own_ops(device: str) -> Mapping[str, Function]:
    """Our ops on ``device``: kernels if available, else stock operations with one warning."""
    stock: dict[str, Function] = {name: op.torch_function for name, op in EVERY_OP.items()}
    stock[PROMPT_ATTENTION] = prompt_attention(device)
    if device != "cuda":
        return stock
    if not capi.available():
        warnings.warn(
            "our CUDA kernels were not found: attention runs through torch's own, many times "
            f"slower. Build them ({INSTALL_KERNELS}), or name the library in "
            f"{capi.LIBRARY_VARIABLE}.",
            stacklevel=2,
        )
        return stock
    calls = {name: op.kernel_call for name, op in EVERY_OP.items()}
    launched = {name: capi.launched(call) for name, call in calls.items() if call}
    return {**stock, **launched, "FusedMoe": fused_moe, "GatedDelta": gated_delta}


def with_lifetimes(steps: Sequence[Step], kept: Collection[str]) -> list[Step]:
    """Add to each step the values that no later step needs, so that they can be freed. Values in
    ``kept`` are never freed.
    """
    last = {name: i for i, step in enumerate(steps) for name in (*step.outputs, *step.inputs)}
    ends: list[list[str]] = [[] for _ in steps]
    made = {name for step in steps for name in step.outputs}
    for name, i in last.items():
        if name in made and name not in kept:
            ends[i].append(name)
    return [replace(step, done_with=tuple(done)) for step, done in zip(steps, ends, strict=True)]


def compute(step: Step, values: Values) -> None:
    """Add the outputs of ``step`` to ``values``; drop values that no later step needs."""
    found = step.function(*(values[name] for name in step.inputs), **step.attributes)
    values.update(zip(step.outputs, found if isinstance(found, tuple) else (found,), strict=True))
    for name in step.done_with:
        del values[name]


def computed(steps: Sequence[Step], given: Values) -> Values:
    """Return the values after running ``steps`` on ``given``."""
    values = dict(given)
    for step in steps:
        compute(step, values)
    return values
