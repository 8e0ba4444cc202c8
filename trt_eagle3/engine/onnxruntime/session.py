"""The ONNX Runtime session, the default: float32 on the CPU, caches updated in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx.inliner import inline_local_functions
from torch import Tensor

from trt_eagle3.dtype import dtype_of_onnx, dtype_of_torch
from trt_eagle3.engine.onnxruntime.library import onnxruntime as ort
from trt_eagle3.engine.onnxruntime.packed_products import with_packed_products
from trt_eagle3.engine.runtime.session import Session, check_names
from trt_eagle3.engine.runtime.weights import integer_rows
from trt_eagle3.errors import UserError
from trt_eagle3.graph.activations import read_activations
from trt_eagle3.graph.formats.format import IntegerRows
from trt_eagle3.graph.states import read_states
from trt_eagle3.graph.weight_nodes import Arrays, with_weight_nodes
from trt_eagle3.graph.weights import WeightExpr, WeightPart
from trt_eagle3.spec import StateSpec

__all__ = ["OnnxRuntimeSession"]

_ONE_THREAD_BYTES = 32e6
"""A graph with fewer bytes of weights runs on one thread. Waking a second thread costs more than it
saves (10 % for the tiny pair).
"""


class OnnxRuntimeSession(Session):
    """Runs one graph.

    A cache tensor is bound to an input and to the output that scatters into it. The update then
    happens in place, so a cache costs no copy per step. Measured for ScatterND: 5 to 18 us, for any
    cache size.
    """

    def __init__(
        self,
        model: Path,
        weights_root: Path,
        intermediates: Sequence[str] = (),
        device: str = "cpu",
    ) -> None:
        if device != "cpu":
            raise UserError(
                f"engine.device: the onnxruntime backend runs on the cpu, got {device!r}"
            )
        try:
            proto = _with_intermediates(model, intermediates)
            self._states: tuple[StateSpec, ...] = read_states(proto)
            proto, arrays = _with_weights(proto, weights_root)
            options = _options(proto, weights_root, sum(a.nbytes for a in arrays.values()))
            # ONNX Runtime does not keep the memory alive, and does not copy non-contiguous arrays
            self._handed = [np.ascontiguousarray(array) for array in arrays.values()]
            values = [ort.OrtValue.ortvalue_from_numpy(array) for array in self._handed]
            if values:
                options.add_external_initializers(list(arrays), values)
            self._session = ort.InferenceSession(
                proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except (UserError, MemoryError):
            raise
        except Exception as error:  # onnxruntime's own errors have no base class but Exception
            reason = " ".join(str(error).split())
            raise UserError(
                f"{model}: ONNX Runtime cannot load it: {reason}. Rebuild the bundle."
            ) from error
        self._binding = self._session.io_binding()
        dtypes = {i.name: _dtype(i) for i in proto.graph.input}
        self._inputs = {i.name: _input(i, dtypes[i.name]) for i in self._session.get_inputs()}
        self._outputs = [o.name for o in self._session.get_outputs()]
        self._bound: dict[str, Tensor] = {}
        self._output_order: dict[str, None] = {}  # order of first binding, as in get_outputs

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """Layer states that the graph keeps between runs, in the order of the layers."""
        return self._states

    def bind(self, name: str, tensor: Tensor) -> None:
        """Use ``tensor`` (contiguous, CPU) as the static buffer of input or output ``name``."""
        assert tensor.is_contiguous(), f"{name}: a static buffer must be contiguous"
        element_type = np.dtype(dtype_of_torch(tensor.dtype).name)
        place = ("cpu", 0, element_type, list(tensor.shape), tensor.data_ptr())
        if name in self._inputs:
            self._binding.bind_input(name, *place)
        elif name in self._outputs:
            self._binding.bind_output(name, *place)
            self._output_order.setdefault(name)
        else:
            raise UserError(f"{name}: the graph has no such input or output")
        self._bound[name] = tensor  # ONNX Runtime does not keep the memory alive

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run once over CPU tensors; return the outputs that have no static buffer."""
        check_names(inputs, self._inputs, self._bound)
        kept = [self._bind_input(name, tensor) for name, tensor in inputs.items()]
        free = [name for name in self._outputs if name not in self._bound]
        for name in free:
            self._binding.bind_output(name, "cpu")
            self._output_order.setdefault(name)
        self._session.run_with_iobinding(self._binding)
        del kept
        found = dict(zip(self._output_order, self._binding.get_outputs(), strict=True))
        return {name: torch.from_numpy(found[name].numpy()) for name in free}

    def _bind_input(self, name: str, tensor: Tensor) -> Tensor:
        expected, shape = self._inputs[name], list(tensor.shape)
        if not expected.takes(tensor.dtype, shape):
            raise UserError(f"{name}: expected {expected.description}, got {tensor.dtype} {shape}")
        tensor = tensor.contiguous()
        self._binding.bind_input(name, "cpu", 0, expected.element_type, shape, tensor.data_ptr())
        return tensor


@dataclass(frozen=True)
class _Input:
    """Requirements of a graph input. They are cached, as they are checked some fifty times a cycle.

    Attributes:
        description: type and shape as ONNX Runtime names them. rank: number of axes. sizes: by
            axis, of the fixed axes.
    """

    description: str
    dtype: torch.dtype
    element_type: np.dtype[Any]
    rank: int
    sizes: Mapping[int, int]

    def takes(self, dtype: torch.dtype, shape: Sequence[int]) -> bool:
        """Return whether a tensor of this type and shape may be bound."""
        same = dtype == self.dtype and len(shape) == self.rank
        return same and all(shape[axis] == size for axis, size in self.sizes.items())


def _input(found: Any, dtype: torch.dtype) -> _Input:
    """Convert ONNX Runtime's ``NodeArg``."""
    return _Input(
        description=f"{found.type} {found.shape}",
        dtype=dtype,
        element_type=np.dtype(dtype_of_torch(dtype).name),
        rank=len(found.shape),
        sizes={axis: size for axis, size in enumerate(found.shape) if isinstance(size, int)},
    )


def _with_intermediates(model: Path, intermediates: Sequence[str]) -> onnx.ModelProto:
    """Return the model with the tensors ``intermediates`` added to its outputs."""
    proto = onnx.load(model, load_external_data=False)
    known = {name for node in proto.graph.node for name in node.output}
    for name in intermediates:
        if name not in known:
            raise UserError(f"{model}: the graph has no tensor {name}")
        proto.graph.output.add(name=name)
    return proto


def _with_weights(proto: onnx.ModelProto, root: Path) -> tuple[onnx.ModelProto, Arrays]:
    """Return the model with nodes that prepare its weights, and the weights to pass next to it."""

    def unpack(expr: WeightExpr, part: WeightPart) -> IntegerRows:
        return integer_rows(expr, part, root)

    packed: Arrays = {}
    if read_activations(proto) == "int8":
        proto, packed = with_packed_products(proto, unpack)
    proto, unpacked = with_weight_nodes(proto, unpack)
    # ONNX Runtime inlines too, but checks the whole graph after each function: the tiny pair's
    # target loads in 0.21 s that way, and in 0.14 s this way
    return inline_local_functions(proto), {**packed, **unpacked}


def _options(proto: onnx.ModelProto, weights_root: Path, handed: int) -> ort.SessionOptions:
    """Return session options; ``handed``: bytes of the weights passed next to the model."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # A cycle runs three sessions: idle threads of one that spin would take the next one's cores.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(weights_root)
    )
    # Fold the nodes that prepare weights once at load. By default, tensors above 1 GiB are computed
    # in every step.
    options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", "0")
    lengths = (
        e.value for i in proto.graph.initializer for e in i.external_data if e.key == "length"
    )
    if sum(map(int, lengths)) + handed < _ONE_THREAD_BYTES:
        options.intra_op_num_threads = 1
    return options


def _dtype(graph_input: onnx.ValueInfoProto) -> torch.dtype:
    return dtype_of_onnx(graph_input.type.tensor_type.elem_type).torch
