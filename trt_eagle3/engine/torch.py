"""The torch session: interprets a graph node by node, on the CPU or on CUDA.

It is the debugger (any tensor of the graph can be asked for by name) and runs where there is no TensorRT. On CUDA our
ops go through our kernels (``engine/capi.py``), by stock operations where the library is absent.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
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

__all__ = ["TorchSession"]


@dataclass(frozen=True)
class _Step:
    """One node: what it computes, from what, into what, and which values nothing after it needs."""

    function: Function
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    done_with: tuple[str, ...] = ()


class TorchSession:
    """Runs one graph; implements ``engine.session.Session``. Caches are updated in place where they are bound."""

    def __init__(self, model: Path, weights_root: Path, taps: Sequence[str] = (), device: str = "cpu") -> None:
        self.device = torch.device(device)
        proto = _load(model)
        self._inputs = {i.name: i.type.tensor_type for i in proto.graph.input}
        known = {name for node in proto.graph.node for name in node.output}
        for name in taps:
            if name not in known:
                raise UserError(f"{model}: the graph has no tensor {name}")
        self._outputs = [o.name for o in proto.graph.output] + list(taps)
        self._bound: dict[str, Tensor] = {}
        values = {i.name: _weight(i, weights_root, self.device) for i in proto.graph.initializer}
        steps = [_step(node, self.device) for node in proto.graph.node]
        self._constants, steps = _fold(values, steps)
        self._steps = _with_lifetimes(steps, {*self._outputs, *self._constants})

    def bind(self, name: str, tensor: Tensor) -> None:
        """Let ``tensor`` be the static buffer of input or output ``name``."""
        if name not in self._inputs and name not in self._outputs:
            raise UserError(f"{name}: the graph has no such input or output")
        self._bound[name] = tensor

    @torch.inference_mode()
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run once; returns the outputs that have no static buffer, on this session's device."""
        values = {**self._constants, **self._bound, **{n: self._checked(n, t) for n, t in inputs.items()}}
        missing = [name for name in self._inputs if name not in values]
        if missing:
            raise UserError(f"{', '.join(missing)}: input not given")
        for step in self._steps:
            found = step.function(*(values[name] for name in step.inputs), **step.attributes)
            values.update(zip(step.outputs, found if isinstance(found, tuple) else (found,), strict=True))
            for name in step.done_with:
                del values[name]
        return self._results(values)

    def _results(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Free outputs; bound ones that were not computed in place are written to their buffers."""
        free = {}
        for name in self._outputs:
            buffer = self._bound.get(name)
            if buffer is None:
                free[name] = values[name]
            elif buffer.data_ptr() != values[name].data_ptr():
                buffer.copy_(values[name])
        return free

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._inputs:
            raise UserError(f"{name}: the graph has no such input; it has {', '.join(self._inputs)}")
        if name in self._bound:
            raise UserError(f"{name}: has a static buffer; write there, or give it no buffer")
        expected = self._inputs[name]
        shape = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in expected.shape.dim]
        fits = len(shape) == tensor.ndim and all(
            isinstance(e, str) or e == a for e, a in zip(shape, tensor.shape, strict=True)
        )
        if TORCH_TYPES[expected.elem_type] != tensor.dtype or not fits:
            kind = helper.tensor_dtype_to_np_dtype(expected.elem_type)
            raise UserError(f"{name}: expected {kind} {shape}, got {tensor.dtype} {list(tensor.shape)}")
        moved = tensor.to(self.device)
        # an unbound cache is the caller's: the kernels write in place, so they get a copy
        return moved.clone() if "cache" in name and moved is tensor else moved


def _load(model: Path) -> onnx.ModelProto:
    try:
        return onnx.load(model, load_external_data=False)
    except Exception as error:  # protobuf's own errors have no base class but Exception
        reason = " ".join(str(error).split())
        raise UserError(f"{model}: cannot load it: {reason}. Rebuild the bundle.") from error


def _weight(proto: onnx.TensorProto, root: Path, device: torch.device) -> Tensor:
    """An initializer: mapped from its file, or from the model; int64 ones stay on the CPU."""
    if proto.data_location != onnx.TensorProto.EXTERNAL:
        tensor = torch.from_numpy(numpy_helper.to_array(proto).copy())
        return tensor if tensor.dtype == torch.int64 else tensor.to(device)
    place = {entry.key: entry.value for entry in proto.external_data}
    file, num_bytes = root / place["location"], int(place["length"])
    try:
        # mode c: copy on write, so that torch may call the memory its own
        raw = np.memmap(file, dtype=np.uint8, mode="c", offset=int(place["offset"]), shape=(num_bytes,))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot map {proto.name}: {error}. Rebuild the bundle.") from error
    return torch.from_numpy(raw).view(TORCH_TYPES[proto.data_type]).view(list(proto.dims)).to(device)


def _step(node: onnx.NodeProto, device: torch.device) -> _Step:
    functions = _own_ops(device.type) if node.domain == DOMAIN else STANDARD_OPS
    if node.op_type not in functions:
        raise UserError(f"{node.name}: the torch session does not know op {node.op_type}")
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return _Step(functions[node.op_type], tuple(node.input), tuple(node.output), attributes)


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
    }


def _kernel_add_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None, *, epsilon: float) -> Any:
    y, total = capi.add_rms_norm(x, weight, residual, epsilon=epsilon)
    return y if residual is None else (y, total)


def _kernel_tree_attention(*inputs: Tensor, page_size: int, scale: float, **geometry: int) -> Any:
    """Geometry (head counts) is in the tensors' shapes already."""
    del geometry
    return capi.tree_attention(*inputs, page_size=page_size, scale=scale), inputs[3], inputs[4]


def _fold(values: dict[str, Tensor], steps: list[_Step]) -> tuple[dict[str, Tensor], list[_Step]]:
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


def _with_lifetimes(steps: list[_Step], kept: set[str]) -> list[_Step]:
    """Each step with the values it is the last to need, so that they can be freed."""
    last = {name: i for i, step in enumerate(steps) for name in (*step.outputs, *step.inputs)}
    ends: list[list[str]] = [[] for _ in steps]
    made = {name for step in steps for name in step.outputs}
    for name, i in last.items():
        if name in made and name not in kept:
            ends[i].append(name)
    return [replace(step, done_with=tuple(done)) for step, done in zip(steps, ends, strict=True)]
