"""Convert described weights to standard nodes, for runtimes that support only ONNX.

ONNX Runtime folds the nodes once, at load. Nodes are used because a tensor passed in
``SessionOptions.add_external_initializers`` lives as long as the session. The kernels' own packed
copy would double the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from trt_eagle3.dtype import dtype_named
from trt_eagle3.graph.formats.format import IntegerFormat, IntegerRows, NodeFormat
from trt_eagle3.graph.weight_formats import WEIGHT_FORMATS
from trt_eagle3.graph.weights import (
    DESCRIBED,
    METADATA_KEY,
    StoredTensor,
    WeightExpr,
    WeightPart,
    descriptions,
    weight_initializer,
)

__all__ = ["Arrays", "Unpack", "array_initializer", "with_weight_nodes"]

Unpack = Callable[[WeightExpr, WeightPart], IntegerRows]
"""Read the whole numbers of an integer part from disk."""
Arrays = Mapping[str, NDArray[Any]]
"""Tensors to pass to a runtime, by initializer name."""
_FLOAT = dtype_named("float32").onnx


def with_weight_nodes(model: onnx.ModelProto, unpack: Unpack) -> tuple[onnx.ModelProto, Arrays]:
    """Convert every weight of ``model`` to a tensor on disk or in memory. It is not changed.

    Returns:
        The model, and the unpacked whole numbers of integer weights. No standard node can read
        their packings.
    Raises:
        UserError: its metadata do not describe a weight.
    """
    lowering = _Lowering(unpack)
    described = descriptions(model)
    for name, expr in described.items():
        lowering.weight(name, expr)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    kept = [proto for proto in graph.initializer if proto.name not in described]
    nodes = [*lowering.nodes, *graph.node]
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend([*kept, *lowering.initializers])
    graph.node.extend(nodes)
    metadata = [entry for entry in made.metadata_props if entry.key != METADATA_KEY]
    del made.metadata_props[:]
    made.metadata_props.extend(metadata)
    return made, lowering.arrays


def array_initializer(name: str, array: NDArray[Any]) -> TensorProto:
    """Create the initializer of an array that is passed to a runtime beside the model."""
    dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
    proto = TensorProto(name=name, data_type=dtype, dims=array.shape)
    proto.data_location = TensorProto.EXTERNAL
    proto.external_data.add(key="location", value=DESCRIBED)
    return proto


class _Lowering:
    """Collect the nodes of all weights, and the tensors that they read."""

    def __init__(self, unpack: Unpack) -> None:
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.arrays: dict[str, NDArray[Any]] = {}
        self._unpack = unpack
        self._known: dict[tuple[str, int, str], str] = {}

    def weight(self, name: str, expr: WeightExpr) -> None:
        """Add the nodes that compute ``name``."""
        made = [self._part(f"{name}/part.{i}", p, expr) for i, p in enumerate(expr.parts)]
        if expr.experts:
            whole = self._node("Concat", made, f"{name}/rows", axis=0)
            shape = self._constant(f"{name}/shape", list(expr.shape))
            self._node("Reshape", [whole, shape], name)
        elif len(made) > 1:
            self._node("Concat", made, name, axis=0)
        else:  # it has a node; otherwise it would be stored
            self.nodes[-1].output[0] = name

    def _part(self, prefix: str, part: WeightPart, expr: WeightExpr) -> str:
        """Compute one part's values in the weight's type. Return their name."""
        value = self._values(prefix, part, expr)
        if part.row_range != (0, part.values_shape[0]):
            value = self._slice(value, f"{prefix}/rows", part.row_range, 0)
        if part.columns:
            value = self._slice(value, f"{prefix}/columns", part.columns, 1)
        if part.transpose:
            value = self._node("Transpose", [value], f"{prefix}/transposed", perm=[1, 0])
        if part.scale == 1.0 and part.dtype == expr.dtype and not part.quantised:
            return value
        if part.scale != 1.0:
            value = self._scaled(value, prefix, part.scale)
        return self._node("Cast", [value], f"{prefix}/cast", to=expr.dtype.onnx)

    def _slice(self, value: str, name: str, taken: tuple[int, int], axis: int) -> str:
        places = {"first": taken[0], "end": taken[1], "axis": axis}
        inputs = [self._constant(f"{name}/{key}", [at]) for key, at in places.items()]
        return self._node("Slice", [value, *inputs], name)

    def _values(self, prefix: str, part: WeightPart, expr: WeightExpr) -> str:
        """Compute all values of a part, before slicing. Parts of one tensor share them."""
        key = (part.location, part.offset, expr.format)
        if key not in self._known:
            self._known[key] = self._new_values(prefix, part, expr)
        return self._known[key]

    def _new_values(self, prefix: str, part: WeightPart, expr: WeightExpr) -> str:
        if part.quantised is None:
            return self.stored(prefix, part.stored[0])
        form: Any = WEIGHT_FORMATS[expr.format]
        if isinstance(form, IntegerFormat):
            return self._integers(prefix, self._unpack(expr, part))
        nodes: NodeFormat = form
        return nodes.dequantise_nodes(part.quantised, _PartNodes(self, prefix, part))

    def _integers(self, prefix: str, rows: IntegerRows) -> str:
        """Compute (codes - zeros) * scales, with the group of each column."""
        wide = {}
        for name in ("codes", "zeros", "scales"):
            array = getattr(rows, name).contiguous().numpy()
            self.arrays[f"{prefix}/{name}"] = array
            proto = array_initializer(f"{prefix}/{name}", array)
            self.initializers.append(proto)
            wide[name] = self._node("Cast", [proto.name], f"{prefix}/{name}/wide", to=_FLOAT)
        groups = self._constant(f"{prefix}/groups", rows.groups.tolist())
        for name in ("zeros", "scales"):
            inputs = [wide[name], groups]
            wide[name] = self._node("Gather", inputs, f"{prefix}/{name}/columns", axis=1)
        whole = self._node("Sub", [wide["codes"], wide["zeros"]], f"{prefix}/whole")
        return self._node("Mul", [whole, wide["scales"]], f"{prefix}/values")

    def stored(self, name: str, tensor: StoredTensor) -> str:
        """Create the initializer ``name`` of a tensor as stored on disk."""
        place = (tensor.name, tensor.location, tensor.offset, tensor.num_bytes)
        part = WeightPart(*place, tensor.dtype, tensor.shape or (1,))
        self.initializers.append(weight_initializer(name, WeightExpr((part,), tensor.dtype)))
        return name

    def _scaled(self, value: str, prefix: str, scale: float) -> str:
        wide = self._node("Cast", [value], f"{prefix}/wide", to=dtype_named("float32").onnx)
        factor = numpy_helper.from_array(np.array(scale, dtype=np.float32), f"{prefix}/scale")
        self.initializers.append(factor)
        return self._node("Mul", [wide, factor.name], f"{prefix}/scaled")

    def _constant(self, name: str, values: list[int]) -> str:
        array = np.array(values, dtype=np.int64)
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def _node(self, kind: str, inputs: list[str], output: str, **attributes: object) -> str:
        self.nodes.append(
            helper.make_node(kind, inputs, [output], name=f"{output}/{kind}", **attributes)
        )
        return output


class _PartNodes:
    """Implements ``WeightNodes`` for one part."""

    def __init__(self, lowering: _Lowering, prefix: str, part: WeightPart) -> None:
        self._lowering, self._prefix, self._count = lowering, prefix, 0
        self._stored = {tensor.role: tensor for tensor in part.stored}

    def stored(self, role: str) -> str:
        """Create the tensor of a role."""
        return self._lowering.stored(f"{self._prefix}/stored.{role}", self._stored[role])

    def constant(self, values: NDArray[Any]) -> str:
        """Create an initializer inside the model."""
        name = self._new_name("constant")
        self._lowering.initializers.append(numpy_helper.from_array(values, name))
        return name

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output."""
        output = self._new_name(kind)
        self._lowering.nodes.append(
            helper.make_node(kind, inputs, [output], name=f"{output}/node", **attributes)
        )
        return output

    def _new_name(self, kind: str) -> str:
        self._count += 1
        return f"{self._prefix}/{kind.lower()}.{self._count}"
