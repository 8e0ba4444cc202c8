"""Lower our ops to standard operators of opset 17, for an engine without our plugins."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import inliner
from onnx.reference import ReferenceEvaluator

from trt_eagle3.graph.ops import DOMAIN, EVERY_OP, OPSET_17

__all__ = ["lowered"]


def lowered(model: onnx.ModelProto, dtype: int) -> onnx.ModelProto:
    """Replace plugin nodes of ``model`` by standard operators.

    ``model``: from ``graph.trt_export``, with compute type ``dtype``.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    functions: dict[tuple[str, str], onnx.FunctionProto] = {}
    for node in made.graph.node:
        if node.domain == DOMAIN:
            op = EVERY_OP[node.op_type]
            overload = op.overload(len(node.input))
            own = op.attributes[overload]
            kept = [a for a in node.attribute if a.name in own]
            del node.attribute[:]
            node.attribute.extend(kept)
            name = f"{node.op_type}_{overload}"
            functions.setdefault((node.op_type, overload), op.function_17(overload, name, dtype))
            node.op_type = name
    made.functions.extend(functions.values())
    made = inliner.inline_local_functions(made)
    _fold_constants(made.graph)
    for node in made.graph.node:  # TensorRT 8.6 selects float32 nodes by name
        node.name = node.name or f"{node.output[0]}/{node.op_type}"
    return made


def _fold_constants(graph: onnx.GraphProto) -> None:
    """Compute values that depend on attributes alone.

    TensorRT requires some of them, such as the sizes of a Split, as constants.
    """
    known = {
        i.name: onnx.numpy_helper.to_array(i) for i in graph.initializer if not i.external_data
    }
    for node in list(graph.node):
        if node.domain or not all(name in known for name in node.input):
            continue
        function = ReferenceEvaluator(_alone(node))
        known[node.output[0]] = function.run(None, {name: known[name] for name in node.input})[0]
        graph.initializer.append(
            onnx.numpy_helper.from_array(np.asarray(known[node.output[0]]), node.output[0])
        )
        graph.node.remove(node)


def _alone(node: onnx.NodeProto) -> onnx.ModelProto:
    inputs, outputs = (
        [onnx.ValueInfoProto(name=n) for n in names] for names in (node.input, node.output)
    )
    graph = onnx.helper.make_graph([node], "alone", inputs, outputs)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET_17)])
