"""Described weights as standard nodes: the reference lowering, for runtimes that know ONNX alone.

ONNX Runtime folds the nodes once, at load. It is given nodes because a tensor handed over in
``SessionOptions.add_external_initializers`` lives as long as the session, beside the copy that its
kernels pack for themselves: twice the memory.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from trt_eagle3.dtype import dtype_named
from trt_eagle3.graph.weight_formats import WEIGHT_FORMATS
from trt_eagle3.graph.weights import (
    METADATA_KEY,
    WeightExpr,
    WeightPart,
    descriptions,
    weight_initializer,
)

__all__ = ["with_weight_nodes"]


def with_weight_nodes(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` whose every external initializer is a tensor on disk; it is not changed.

    Raises:
        UserError: its metadata do not describe a weight.
    """
    lowering = _Lowering()
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
    return made


class _Lowering:
    """Collects the nodes of all weights, and the tensors that they start from."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []

    def weight(self, name: str, expr: WeightExpr) -> None:
        """Add the nodes that make ``name``."""
        made = [self._part(f"{name}/part.{i}", p, expr) for i, p in enumerate(expr.parts)]
        if len(made) > 1:
            self._node("Concat", made, name, axis=0)
        else:  # it has a node, or it would be stored
            self.nodes[-1].output[0] = name

    def _part(self, prefix: str, part: WeightPart, expr: WeightExpr) -> str:
        """One part's values in the weight's type; returns their name."""
        tensor = WeightPart(
            part.name, part.location, part.offset, part.num_bytes, part.dtype, part.shape
        )
        stored = WeightExpr((tensor,), part.dtype)
        self.initializers.append(weight_initializer(prefix, stored))
        value = prefix
        if part.row_range != (0, part.shape[0]):
            first, end = (self._constant(f"{prefix}/{r}", [r]) for r in part.row_range)
            value = self._node("Slice", [value, first, end], f"{prefix}/rows")
        dequantise = WEIGHT_FORMATS[expr.format].dequantise_nodes(part, value)
        self.nodes += dequantise
        value = dequantise[-1].output[0] if dequantise else value
        if part.transpose:
            value = self._node("Transpose", [value], f"{prefix}/transposed", perm=[1, 0])
        if part.scale == 1.0 and part.dtype == expr.dtype and not dequantise:
            return value
        if part.scale != 1.0:
            value = self._scaled(value, prefix, part.scale)
        return self._node("Cast", [value], f"{prefix}/cast", to=expr.dtype.onnx)

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
