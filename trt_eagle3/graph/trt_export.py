"""Convert a graph for TensorRT's ONNX parser: opset 17, plugin nodes, and one weights file.

Changes to the graph of ``build_graphs``, with their reasons:
- The reference functions are removed. TensorRT 8.6 cannot read them; 10 and 11 would inline them in
  place of our plugins.
- Nodes of our ops get the attributes from which a plugin determines its types
  (``plugins/tensorrt/README.md``).
- Every weight refers to one file, which ``engine/builder/weight_file.py`` writes.
- ``Shape`` with a ``start`` becomes ``Shape`` and ``Gather``: the parser of 8.6 ignores the
  attribute.
- ``Gelu``, which opset 17 lacks, is expanded.
- ``Pad`` that removes rows becomes ``Pad`` and ``Slice``: the parser of 8.6 refuses negative pads.
- Router logits of mixtures of experts become outputs for validation. The plugin needs them in
  memory anyway.
- On request, ``Gemm`` becomes the plugin ``Linear``: 8.6 runs its own as convolutions between
  layout copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from trt_eagle3.dtype import COMPUTE_DTYPES
from trt_eagle3.errors import UserError
from trt_eagle3.graph.ops import DOMAIN, EVERY_OP, OPSET_17
from trt_eagle3.graph.ops.op import Shapes
from trt_eagle3.graph.plugin_ops import plugin_attributes
from trt_eagle3.graph.states import copy_states
from trt_eagle3.graph.weights import WeightExpr, WeightPart, external_weights, weight_initializer

__all__ = [
    "WEIGHTS_FILE",
    "TrtExport",
    "float32_nodes",
    "check_plugins",
    "trt_export",
]

WEIGHTS_FILE = "weights.bin"
_IR_VERSION = 8  # of opset 17
_ALIGNMENT = 256
_COMPUTE_TYPES = {dtype.onnx for dtype in COMPUTE_DTYPES}
_LINEAR_MULTIPLE = 32  # of K, required by the kernel of the Linear plugin


@dataclass(frozen=True)
class TrtExport:
    """The exported model, which refers to ``WEIGHTS_FILE`` beside it.

    Attributes:
        offsets: weight -> byte offset in that file.
        weights: weight -> its expression.
        intermediates: inner tensors that are also outputs of this model.
    """

    model: onnx.ModelProto
    offsets: Mapping[str, int]
    weights: Mapping[str, WeightExpr]
    intermediates: tuple[str, ...] = ()

    @property
    def weight_bytes(self) -> int:
        """Total bytes of all weights."""
        return sum(expr.num_bytes for expr in self.weights.values())


def trt_export(model: onnx.ModelProto, *, linear: bool = False) -> TrtExport:
    """Convert ``model`` for TensorRT. It is not changed, and no weight is read.

    Args:
        linear: convert products with a 16-bit weight and no bias to ``Linear`` nodes."""
    values = _Values(model, linear)
    nodes = [new for node in model.graph.node for new in values.rewritten(node)]
    routers = values.router_logits(model.graph.node)
    values.shorten_names(nodes)
    used = {name for node in nodes for name in node.input}
    weights = {name: expr for name, expr in values.weights.items() if name in used}
    offsets, end = {}, 0
    for name, expr in weights.items():
        offsets[name] = end
        end += -(-expr.num_bytes // _ALIGNMENT) * _ALIGNMENT
    initializers = [_reference(name, expr, offsets[name]) for name, expr in weights.items()]
    initializers += [proto for name, proto in values.constants.items() if name in used]
    outputs = [*model.graph.output, *routers]
    graph = helper.make_graph(nodes, model.graph.name, model.graph.input, outputs, initializers)
    opsets = [helper.make_opsetid("", OPSET_17), helper.make_opsetid(DOMAIN, 1)]
    made = helper.make_model(
        graph, producer_name="trt-eagle3", opset_imports=opsets, ir_version=_IR_VERSION
    )
    copy_states(model, made)
    return TrtExport(made, offsets, weights, tuple(router.name for router in routers))


def with_prefetch_safe(model: onnx.ModelProto) -> onnx.ModelProto:
    """Set ``prefetch_safe`` on an exported model's TreeAttention nodes.

    They then read caches, page table and lengths before the launch before them ends. An engine of
    the model must not copy one of those at every step, because the copy may come right before
    attention.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for node in made.graph.node:
        if _may_prefetch(node):
            node.attribute.append(helper.make_attribute("prefetch_safe", 1))
    return made


def is_prefetch_safe(model: onnx.ModelProto) -> bool:
    """Return whether ``model`` comes from ``with_prefetch_safe``."""
    return any(
        _attribute(node, "prefetch_safe") for node in model.graph.node if _may_prefetch(node)
    )


def _may_prefetch(node: onnx.NodeProto) -> bool:
    return node.domain == DOMAIN and "prefetch_safe" in EVERY_OP[node.op_type].plugin_attributes


def float32_nodes(model: onnx.ModelProto) -> set[str]:
    """Return the names of an exported model's standard nodes that compute in float32.

    TensorRT 8.6 needs the list.
    """
    values = _Values(model)
    for node in model.graph.node:
        values.infer_types(node)
    standard = (node for node in model.graph.node if node.domain != DOMAIN)
    return {node.name for node in standard if values.types[node.output[0]] == TensorProto.FLOAT}


class _Values:
    """The types and constants of the graph's values, collected while its nodes are processed."""

    def __init__(self, model: onnx.ModelProto, linear: bool = False) -> None:
        self._linear = linear
        self.weights = external_weights(model)
        self.constants: dict[str, TensorProto] = {}
        self.types = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
        self._ranks = {i.name: len(i.type.tensor_type.shape.dim) for i in model.graph.input}
        self._compute = _compute_type(model)
        for proto in model.graph.initializer:
            self.types[proto.name] = proto.data_type
            if proto.name not in self.weights:
                self.constants[proto.name] = proto

    def rewritten(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return the nodes that replace ``node``."""
        if node.domain == DOMAIN:
            return [self._plugin_node(node)]
        if node.op_type == "Shape" and _attribute(node, "start"):
            return self._shape_from(node)
        if node.op_type == "Gelu":
            return self._gelu(node)
        if node.op_type == "Pad" and (self._pads(node) < 0).any():
            return self._pad_and_slice(node)
        if self._linear and self._is_linear(node):
            return [self._plugin_node(_linear_node(node))]
        self.infer_types(node)
        kept = onnx.NodeProto()
        kept.CopyFrom(node)
        return [kept]

    def infer_types(self, node: onnx.NodeProto) -> None:
        """Record the element types of a node's outputs."""
        if node.domain != DOMAIN:
            self._set_type(node.output, _result_type(node, self.types))
            return
        inputs = [self.types[name] for name in node.input]
        types = EVERY_OP[node.op_type].output_types(inputs, self._compute)
        self.types |= zip(node.output, types, strict=True)

    def router_logits(self, nodes: Iterable[onnx.NodeProto]) -> list[onnx.ValueInfoProto]:
        """Return an output [n, E] for each mixture of experts. Needs the types of all values."""
        found = []
        for node in nodes:
            if node.domain == DOMAIN and node.op_type == "FusedMoe":
                name, num_experts = node.input[1], self.weights[node.input[2]].shape[0]
                shape = ["num_rows", num_experts]
                found.append(helper.make_tensor_value_info(name, self.types[name], shape))
        return found

    def shorten_names(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Remove the file's location from the names of weights if they stay unique."""
        short = {name: name.rpartition(":")[2] for name in self.weights}
        counts = Counter(short.values())
        renames = {
            name: new for name, new in short.items() if counts[new] == 1 and new not in self.types
        }
        self.weights = {renames.get(name, name): expr for name, expr in self.weights.items()}
        for node in nodes:
            node.input[:] = [renames.get(name, name) for name in node.input]

    def _is_linear(self, node: onnx.NodeProto) -> bool:
        """Return whether the ``Linear`` plugin can compute ``node``.

        It computes x [n, K] times the transpose of a weight [N, K].
        """
        if node.op_type != "Gemm" or len(node.input) != 2 or node.input[1] not in self.weights:
            return False
        weight = self.weights[node.input[1]]
        plain = {a.name: helper.get_attribute_value(a) for a in node.attribute} == {"transB": 1}
        same_type = weight.dtype.onnx == self._compute == self.types[node.input[0]]
        whole = len(weight.shape) == 2 and weight.shape[1] % _LINEAR_MULTIPLE == 0
        return plain and same_type and whole and weight.dtype.bits == 16

    def _set_type(self, names: Iterable[str], dtype: int) -> None:
        self.types |= dict.fromkeys(names, dtype)

    def _plugin_node(self, node: onnx.NodeProto) -> onnx.NodeProto:
        made = onnx.NodeProto()
        made.CopyFrom(node)
        made.ClearField("overload")
        self.infer_types(node)
        inputs, outputs = ([self.types[n] for n in names] for names in (node.input, node.output))
        own = EVERY_OP[node.op_type].plugin_values(inputs, outputs)
        added = {**plugin_attributes(self._compute), **own}
        made.attribute.extend(helper.make_attribute(name, value) for name, value in added.items())
        return made

    def _shape_from(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Replace ``Shape`` with a ``start``, of a graph input, by ``Shape`` and ``Gather``."""
        start, whole = _attribute(node, "start"), f"{node.output[0]}/whole"
        index = f"{node.output[0]}/axes"
        rank = self._ranks[node.input[0]]
        self.constants[index] = numpy_helper.from_array(
            np.arange(start, rank, dtype=np.int64), index
        )
        self._set_type((whole, index, node.output[0]), TensorProto.INT64)
        return [
            helper.make_node("Shape", [node.input[0]], [whole], name=f"{node.name}/whole"),
            helper.make_node("Gather", [whole, index], list(node.output), name=node.name, axis=0),
        ]

    def _pads(self, node: onnx.NodeProto) -> NDArray[np.int64]:
        """Return the constant pads of a ``Pad`` [2, rank]: before, then after each axis."""
        pads = np.asarray(numpy_helper.to_array(self.constants[node.input[1]]), dtype=np.int64)
        return pads.reshape(2, -1)

    def _pad_and_slice(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Replace a ``Pad`` with negative pads by one without them, and a ``Slice``."""
        pads, out = self._pads(node), node.output[0]
        padded, added = f"{out}/padded", np.maximum(pads, 0)
        starts, cut = -np.minimum(pads, 0)  # of each axis: elements to remove before and after
        ends = np.where(cut > 0, -cut, np.iinfo(np.int32).max)
        sides = {"pads": added.reshape(-1), "starts": starts, "ends": ends}
        for name, array in sides.items():
            name = f"{out}/{name}"
            self.constants[name] = numpy_helper.from_array(array.astype(np.int64), name)
            self._set_type([name], TensorProto.INT64)
        self._set_type((padded, out), self.types[node.input[0]])
        inputs = [node.input[0], f"{out}/pads", *node.input[2:]]
        slices = [padded, f"{out}/starts", f"{out}/ends"]
        return [
            helper.make_node("Pad", inputs, [padded], name=f"{node.name}/padded"),
            helper.make_node("Slice", slices, [out], name=node.name),
        ]

    def _gelu(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Expand ``Gelu`` to opset 17: x / 2 * (1 + erf(x / sqrt 2)), or with tanh."""
        x, out, dtype = node.input[0], node.output[0], self.types[node.input[0]]
        nodes: list[onnx.NodeProto] = []

        def op(kind: str, *inputs: str, name: str) -> str:
            output = out if name == "out" else f"{out}/{name}"
            nodes.append(helper.make_node(kind, inputs, [output], name=f"{output}/{kind}"))
            self._set_type([output], dtype)
            return output

        def scalar(value: float, name: str) -> str:
            if name not in self.constants:
                array = np.array(value, dtype=np.float32).astype(
                    helper.tensor_dtype_to_np_dtype(dtype)
                )
                self.constants[name] = numpy_helper.from_array(array, name)
                self._set_type([name], dtype)
            return name

        if _attribute(node, "approximate") == b"tanh":
            cube = op("Mul", x, op("Mul", x, x, name="square"), name="cube")
            bent = op(
                "Add", x, op("Mul", cube, scalar(0.044715, "gelu_cubic"), name="small"), name="bent"
            )
            sign = op(
                "Tanh",
                op("Mul", bent, scalar((2 / np.pi) ** 0.5, "gelu_slope"), name="steep"),
                name="sign",
            )
        else:
            sign = op(
                "Erf", op("Mul", x, scalar(0.5**0.5, "gelu_width"), name="narrow"), name="sign"
            )
        gate = op("Mul", x, op("Add", sign, scalar(1.0, "gelu_one"), name="raised"), name="gate")
        op("Mul", gate, scalar(0.5, "gelu_half"), name="out")
        return nodes


def check_plugins(model: onnx.ModelProto) -> None:
    """Check that our plugins support every node of our ops.

    Raises:
        UserError: naming the node, and what its plugin does not support.
    """
    shapes = {name: expr.shape for name, expr in external_weights(model).items()}
    shapes |= {p.name: tuple(p.dims) for p in model.graph.initializer if p.name not in shapes}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        shapes[value.name] = tuple(dim.dim_param or dim.dim_value for dim in dims)
    compute = _compute_type(model)
    for node in model.graph.node:
        if node.domain == DOMAIN:
            _check_plugin(node, shapes, compute)


def _check_plugin(node: onnx.NodeProto, shapes: Shapes, compute: int) -> None:
    op = EVERY_OP[node.op_type]
    inputs = zip(op.inputs[op.overload(len(node.input))], node.input, strict=True)
    known = {name: shapes[value] for name, value in inputs if value in shapes}
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if reason := op.plugin_refuses(attributes, known, compute):
        raise UserError(
            f"{node.name}: TensorRT's plugin {op.plugin}: {reason}. Or build with engine.backend: "
            "torch."
        )


def _linear_node(gemm: onnx.NodeProto) -> onnx.NodeProto:
    name = gemm.name.removesuffix("/Gemm") + "/Linear"
    return helper.make_node("Linear", list(gemm.input), list(gemm.output), name=name, domain=DOMAIN)


def _attribute(node: onnx.NodeProto, name: str) -> Any:
    """Return an attribute's value; None if the node lacks it."""
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), None)


def _result_type(node: onnx.NodeProto, types: Mapping[str, int]) -> int:
    """Return the element type of a standard node's outputs, for operators in our graphs."""
    if node.op_type == "Cast":
        to: int = _attribute(node, "to")
        return to
    if node.op_type == "Shape":
        return int(TensorProto.INT64)
    return types[node.input[1 if node.op_type == "Where" else 0]]


def _compute_type(model: onnx.ModelProto) -> int:
    """Return the type of the first floating input: inputs_embeds, aux_hidden_states or patches."""
    types = (i.type.tensor_type.elem_type for i in model.graph.input)
    return int(next(t for t in types if t in _COMPUTE_TYPES))


def _reference(name: str, expr: WeightExpr, offset: int) -> TensorProto:
    """Create an initializer whose bytes are in ``WEIGHTS_FILE``."""
    place = (name, WEIGHTS_FILE, offset, expr.num_bytes)
    written = WeightPart(*place, expr.dtype, expr.shape)
    return weight_initializer(name, WeightExpr((written,), expr.dtype))
