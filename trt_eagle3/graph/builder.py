"""A small typed builder of ONNX graphs whose weights stay where they are, in safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.dtype import dtype_named
from trt_eagle3.errors import UserError
from trt_eagle3.graph.ops import DOMAIN, OPS, OPSET, reference_function
from trt_eagle3.graph.states import LEADING_DIM, write_states
from trt_eagle3.spec import StateSpec

__all__ = ["FLOAT_TYPES", "Dim", "GraphBuilder", "ResolveLocation", "Value"]

Dim = int | str
ResolveLocation = Callable[[TensorRef], str]
"""Says under which location (relative to the weights root) a tensor's file is found when the
graph is loaded.
"""

FLOAT_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}
_SAFETENSORS_TYPES = {
    "F32": TensorProto.FLOAT,
    "F16": TensorProto.FLOAT16,
    "BF16": TensorProto.BFLOAT16,
}
_IR_VERSION = 10  # the first with function overloads; ONNX Runtime 1.18 and later read it


@dataclass(frozen=True)
class Value:
    """A tensor of the graph: its name and element type (a ``TensorProto`` enum)."""

    name: str
    dtype: int


class GraphBuilder:
    """Collects nodes, inputs, outputs and weight references, and makes a model of them.

    Nodes of the default domain are kept to forms that opset 17 and opset ``OPSET`` share, so that
    TensorRT 8.6 can read the same graph once the reference functions are taken off. ``Gelu`` alone
    is newer: ``graph/trt_export.py`` writes it out.
    """

    def __init__(self, name: str, dtype: str, resolve: ResolveLocation) -> None:
        self.name = name
        self.dtype = FLOAT_TYPES[dtype]
        self._resolve = resolve
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._known: dict[str, Value] = {}
        self._overloads: dict[tuple[str, str], onnx.FunctionProto] = {}
        self._names: set[str] = set()
        self._renames: dict[str, str] = {}
        self._states: list[StateSpec] = []
        self._scope = ""

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of what is made inside with ``name.``."""
        outer, self._scope = self._scope, f"{self._scope}{name}."
        try:
            yield
        finally:
            self._scope = outer

    def input(self, name: str, dtype: int, shape: Sequence[Dim]) -> Value:
        """Declare a graph input."""
        self._inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        self._names.add(name)
        return Value(name, dtype)

    def output(self, value: Value, name: str, shape: Sequence[Dim]) -> None:
        """Declare ``value`` a graph output and call it ``name``.

        Renamed, not copied: a cache is updated in place only if the op itself writes the graph's
        output.
        """
        self._renames[value.name] = name
        self._outputs.append(helper.make_tensor_value_info(name, value.dtype, list(shape)))

    def state(self, spec: StateSpec) -> Value:
        """Declare a state that a layer keeps: an input, listed in the graph's metadata."""
        self._states.append(spec)
        shape: list[Dim] = [LEADING_DIM[spec.kind], *spec.shape]
        return self.input(spec.name, dtype_named(spec.dtype).onnx, shape)

    def update_state(self, spec: StateSpec, value: Value) -> None:
        """Declare ``value`` the output that updates a state; both have one buffer."""
        self.output(value, spec.output_name, (LEADING_DIM[spec.kind], *spec.shape))

    def weight(self, ref: TensorRef, scale: float = 1.0) -> Value:
        """The tensor at ``ref`` as a graph value of the compute type, times ``scale``;
        referenced, not loaded.
        """
        value = self._stored_weight(ref)
        if value.dtype != self.dtype:
            stored = value
            value = self._once(
                f"{stored.name}/cast", lambda name: self.cast(stored, self.dtype, name)
            )
        if scale == 1.0:
            return value
        factor = self.constant(
            np.array(scale, helper.tensor_dtype_to_np_dtype(self.dtype)), f"scale_{scale}"
        )
        return self._once(
            f"{value.name}/scaled_{scale}", lambda name: self.op("Mul", value, factor, name=name)
        )

    def _stored_weight(self, ref: TensorRef) -> Value:
        if ref.dtype not in _SAFETENSORS_TYPES:
            raise UserError(
                f"{ref.file.name}: {ref.name}: expected a float32, float16 or bfloat16 tensor, got "
                f"{ref.dtype}. Use the unquantised checkpoint."
            )
        name = f"{self._resolve(ref)}:{ref.name}"
        if name not in self._known:
            proto = TensorProto(name=name, data_type=_SAFETENSORS_TYPES[ref.dtype], dims=ref.shape)
            proto.data_location = TensorProto.EXTERNAL
            place = {"location": self._resolve(ref), "offset": ref.offset, "length": ref.num_bytes}
            for key, value in place.items():
                proto.external_data.add(key=key, value=str(value))
            self._initializers.append(proto)
            self._known[name] = Value(name, proto.data_type)
        return self._known[name]

    def constant(self, array: NDArray[Any], name: str) -> Value:
        """A small tensor kept inside the model, shared under ``name`` by all who ask for it."""
        if name not in self._known:
            proto = numpy_helper.from_array(array, name)
            self._initializers.append(proto)
            self._known[name] = Value(name, proto.data_type)
        return self._known[name]

    def index(self, i: int) -> Value:
        """The int64 scalar ``i``, for Gather."""
        return self.constant(np.array(i, dtype=np.int64), f"index_{i}")

    def _once(self, key: str, make: Callable[[str], Value]) -> Value:
        if key not in self._known:
            outer, self._scope = self._scope, ""
            self._known[key] = make(key)
            self._scope = outer
        return self._known[key]

    def _new_name(self, name: str) -> str:
        full = self._scope + name
        unique, count = full, 1
        while unique in self._names:
            count += 1
            unique = f"{full}_{count}"
        self._names.add(unique)
        return unique

    def op(
        self, op_type: str, *inputs: Value, dtype: int | None = None, name: str = "", **attrs: Any
    ) -> Value:
        """Add a standard node with one output, of the first input's type unless ``dtype`` says
        otherwise.
        """
        out = Value(
            self._new_name(name or op_type.lower()), inputs[0].dtype if dtype is None else dtype
        )
        self._nodes.append(
            helper.make_node(
                op_type, [v.name for v in inputs], [out.name], name=f"{out.name}/{op_type}", **attrs
            )
        )
        return out

    def split(
        self, value: Value, sizes: Sequence[int], names: Sequence[str], axis: int = -1
    ) -> list[Value]:
        """Cut an axis into pieces of ``sizes``."""
        lengths = self.constant(
            np.array(sizes, dtype=np.int64), f"split_{'_'.join(map(str, sizes))}"
        )
        outs = [Value(self._new_name(n), value.dtype) for n in names]
        self._nodes.append(
            helper.make_node(
                "Split",
                [value.name, lengths.name],
                [o.name for o in outs],
                name=f"{outs[0].name}/Split",
                axis=axis,
            )
        )
        return outs

    def own_op(
        self,
        op_type: str,
        *inputs: Value,
        names: Sequence[str],
        overload: str = "",
        dtypes: Sequence[int] = (),
        **attrs: Any,
    ) -> list[Value]:
        """Add a node of our op set (``graph/ops``); outputs have ``dtypes``, or the first
        input's type.
        """
        expected = OPS[op_type].outputs[overload]
        assert len(names) == len(expected), (
            f"{op_type}: {len(expected)} outputs, got {len(names)} names"
        )
        types = dtypes or [inputs[0].dtype] * len(names)
        outs = [Value(self._new_name(n), dtype) for n, dtype in zip(names, types, strict=True)]
        self._nodes.append(
            helper.make_node(
                op_type,
                [v.name for v in inputs],
                [o.name for o in outs],
                name=f"{outs[0].name}/{op_type}",
                domain=DOMAIN,
                overload=overload,
                **attrs,
            )
        )
        self._overloads.setdefault((op_type, overload), reference_function(op_type, overload))
        return outs

    def cast(self, value: Value, dtype: int, name: str = "cast") -> Value:
        """``value`` as ``dtype``; the value itself where it already is."""
        return (
            value
            if value.dtype == dtype
            else self.op("Cast", value, dtype=dtype, name=name, to=dtype)
        )

    def reshape(self, value: Value, shape: Sequence[int], name: str = "reshape") -> Value:
        """Reshape with ONNX's conventions: 0 copies a dimension, -1 is inferred."""
        target = self.constant(
            np.array(shape, dtype=np.int64), f"shape_{'_'.join(map(str, shape))}"
        )
        return self.op("Reshape", value, target, name=name)

    def concat_weights(
        self, refs: Sequence[TensorRef], name: str, scales: Sequence[float] = ()
    ) -> Value:
        """Weights stacked along their first axis, so that one matrix product serves them all."""
        parts = [
            self.weight(ref, scale)
            for ref, scale in zip(refs, scales or [1.0] * len(refs), strict=True)
        ]
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, name=name, axis=0)

    def linear(
        self,
        x: Value,
        weights: Sequence[TensorRef],
        biases: Sequence[TensorRef] = (),
        name: str = "y",
        scales: Sequence[float] = (),
    ) -> Value:
        """``x [n, in] @ concat(weights [out, in]).T + concat(biases)``; ``scales``: one for each
        weight and bias.
        """
        args = [x, self.concat_weights(weights, f"{name}.weight", scales)]
        if biases:
            args.append(self.concat_weights(biases, f"{name}.bias", scales))
        return self.op("Gemm", *args, name=name, transB=1)

    def build(self) -> onnx.ModelProto:
        """The finished model, with the reference lowering of every op of ours that it uses."""
        for node in self._nodes:
            for names in (node.input, node.output):
                names[:] = [self._renames.get(n, n) for n in names]
        graph = helper.make_graph(
            self._nodes, self.name, self._inputs, self._outputs, self._initializers
        )
        model = helper.make_model(
            graph,
            producer_name="trt-eagle3",
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
            functions=list(self._overloads.values()),
            ir_version=_IR_VERSION,
        )
        write_states(model, self._states)
        return model
