"""A small typed builder of ONNX graphs that reference weights in safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from trt_eagle3.checkpoint.experts import ExpertsRef
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.dtype import dtype_named, dtype_of_onnx
from trt_eagle3.graph.ops import DOMAIN, OPS, OPSET, reference_function
from trt_eagle3.graph.states import LEADING_DIM, write_states
from trt_eagle3.graph.weight_formats import format_of
from trt_eagle3.graph.weight_slices import take_rows
from trt_eagle3.graph.weights import (
    WeightExpr,
    expert_parts,
    part_of,
    weight_initializer,
    write_descriptions,
)
from trt_eagle3.spec import StateSpec

__all__ = ["Dim", "GraphBuilder", "ResolveLocation", "Value"]

Dim = int | str
ResolveLocation = Callable[[TensorRef], str]
"""Return the location of a tensor's file when the graph is loaded, relative to the weights root."""

_IR_VERSION = 10  # the first with function overloads; ONNX Runtime 1.18 and later read it


@dataclass(frozen=True)
class Value:
    """A tensor of the graph: its name and element type (a ``TensorProto`` enum)."""

    name: str
    dtype: int


class GraphBuilder:
    """Collect nodes, inputs, outputs and weight references, and build a model of them.

    Nodes of the default domain use only forms that opset 17 and opset ``OPSET`` share. So TensorRT
    8.6 can read the same graph without the reference functions. Only ``Gelu`` is newer:
    ``graph/trt_export.py`` expands it.
    """

    def __init__(self, name: str, dtype: str, resolve: ResolveLocation) -> None:
        self.name = name
        self.dtype = dtype_named(dtype).onnx
        self._resolve = resolve
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._weights: dict[str, WeightExpr] = {}
        self._known: dict[str, Value] = {}
        self._constants: dict[str, NDArray[Any]] = {}
        self._overloads: dict[tuple[str, str], onnx.FunctionProto] = {}
        self._names: set[str] = set()
        self._renames: dict[str, str] = {}
        self._states: list[StateSpec] = []
        self._scope = ""

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of everything created inside with ``name.``."""
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
        """Declare ``value`` a graph output named ``name``.

        It is renamed, not copied: a cache is updated in place only if the op itself writes the
        graph's output.
        """
        self._renames[value.name] = name
        self._outputs.append(helper.make_tensor_value_info(name, value.dtype, list(shape)))

    def state(self, spec: StateSpec) -> Value:
        """Declare a state of a layer: an input, listed in the graph's metadata."""
        self._states.append(spec)
        shape: list[Dim] = [LEADING_DIM[spec.kind], *spec.shape]
        return self.input(spec.name, dtype_named(spec.dtype).onnx, shape)

    def update_state(self, spec: StateSpec, value: Value) -> None:
        """Declare ``value`` the output that updates a state. Both share a buffer."""
        self.output(value, spec.output_name, (LEADING_DIM[spec.kind], *spec.shape))

    def weight(self, ref: TensorRef, scale: float = 1.0, dtype: int | None = None) -> Value:
        """Reference the tensor at ``ref``, times ``scale``, as a value of the compute type.

        ``dtype`` replaces the compute type. The tensor is not loaded.
        """
        name = f"{self._resolve(ref)}:{ref.name}"
        name += "" if scale == 1.0 else f"/scaled_{scale}"
        name += "" if dtype in {None, self.dtype} else f"/{dtype_of_onnx(dtype).name}"
        found = self._known.get(name)
        return found or self._weight(name, self._expression([ref], [scale], dtype))

    def _expression(
        self, refs: Sequence[TensorRef], scales: Sequence[float], dtype: int | None = None
    ) -> WeightExpr:
        form = format_of(refs)
        parts = (part_of(r, self._resolve, s) for r, s in zip(refs, scales, strict=True))
        return WeightExpr(tuple(parts), dtype_of_onnx(dtype or self.dtype), form)

    def _weight(self, name: str, expr: WeightExpr) -> Value:
        """Create the single initializer of a weight."""
        self._initializers.append(weight_initializer(name, expr))
        self._weights[name] = expr
        self._known[name] = Value(name, expr.dtype.onnx)
        return self._known[name]

    def constant(self, array: NDArray[Any], name: str) -> Value:
        """Add a small tensor stored inside the model; calls with the same ``name`` share it."""
        kept = self._constants.setdefault(name, array)
        same = kept.dtype == array.dtype and np.array_equal(kept, array)
        assert same, f"{name}: two constants have this name"
        if name not in self._known:
            proto = numpy_helper.from_array(array, name)
            self._initializers.append(proto)
            self._known[name] = Value(name, proto.data_type)
        return self._known[name]

    def index(self, i: int) -> Value:
        """Return the int64 scalar ``i``, for Gather."""
        return self.constant(np.array(i, dtype=np.int64), f"index_{i}")

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
        """Add a standard node with one output, of ``dtype`` or else of the first input's type."""
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
        """Split an axis into pieces of ``sizes``."""
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
        """Add a node of our op set (``graph/ops``).

        Outputs have ``dtypes``, or else the first input's type.
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
        """Cast ``value`` to ``dtype``; return it unchanged if it has that type."""
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
        """Stack weights along their first axis, for a single matrix product."""
        factors = scales or [1.0] * len(refs)
        if len(refs) == 1:
            return self.weight(refs[0], factors[0])
        return self._weight(self._new_name(name), self._expression(refs, factors))

    def experts(self, ref: ExpertsRef, name: str, half_scale: float = 1.0) -> Value:
        """Reference the weights [E, out, in] of all experts.

        ``half_scale``: factor of the second half of each expert's rows.
        """
        parts = expert_parts(ref, self._resolve, half_scale)
        expr = WeightExpr(parts, dtype_of_onnx(self.dtype), format_of(ref.parts), ref.shape[0])
        return self._weight(self._new_name(name), expr)

    def rows_of(self, ref: TensorRef, rows: Sequence[tuple[int, int]], name: str) -> Value:
        """Stack the ranges ``rows`` (first, end) of a weight's rows."""
        whole = (part_of(ref, self._resolve),)
        expr = WeightExpr(whole, dtype_of_onnx(self.dtype), format_of([ref]))
        return self._weight(self._new_name(name), take_rows(expr, rows))

    def linear(
        self,
        x: Value,
        weights: Sequence[TensorRef],
        biases: Sequence[TensorRef] = (),
        name: str = "y",
        scales: Sequence[float] = (),
    ) -> Value:
        """Compute ``x [n, in] @ concat(weights [out, in]).T + concat(biases)``.

        ``scales``: one factor for each weight and bias.
        """
        weight = self.concat_weights(weights, f"{name}.weight", scales)
        bias = self.concat_weights(biases, f"{name}.bias", scales) if biases else None
        return self.op("Gemm", x, weight, *([bias] if bias else []), name=name, transB=1)

    def build(self) -> onnx.ModelProto:
        """Build the model, with the reference lowering of every op of ours that it uses."""
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
        write_descriptions(model, self._weights)
        write_states(model, self._states)
        return model
