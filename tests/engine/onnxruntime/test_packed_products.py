"""Products with integer weights by ``MatMulNBits``: which, and what they compute."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from onnx import helper

from tests.engine.runtime.test_quantised_weights import Refs, fused, refs
from tests.quantised import PACKERS
from trt_eagle3.engine.builder.weight_file import write_weights
from trt_eagle3.engine.onnxruntime.packed_products import with_packed_products
from trt_eagle3.engine.onnxruntime.session import OnnxRuntimeSession
from trt_eagle3.engine.runtime.weights import integer_rows, materialise
from trt_eagle3.graph.activations import write_activations
from trt_eagle3.graph.trt_export import trt_export
from trt_eagle3.graph.weights import WeightExpr, weight_initializer, write_descriptions
from trt_eagle3.parity.reference.dequantise import read_values

__all__ = ["refs"]

PACKED = ("int8", "w4a16", "w4a16-asymmetric", "awq", "gptq")
INT8 = 1.5e-2  # 1 / 127 is half a step of int8 over the largest of a block


def product(expr: WeightExpr, *, bias: bool) -> onnx.ModelProto:
    """y = x @ w.T, perhaps + b."""
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", expr.shape[1]])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", expr.shape[0]])
    ones = helper.make_tensor("b", onnx.TensorProto.FLOAT, [expr.shape[0]], [7.0] * expr.shape[0])
    inputs = ["x", "w", *(["b"] if bias else [])]
    node = helper.make_node("Gemm", inputs, ["y"], transB=1)
    graph = helper.make_graph([node], "g", [x], [y], [weight_initializer("w", expr), ones])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10)
    write_descriptions(model, {"w": expr})
    write_activations(model, "int8")
    return model


@pytest.mark.parametrize("name", PACKERS)
def test_weights_written_for_engines_are_the_dequantised_ones(
    name: str, refs: dict[str, Refs], tmp_path: Path
) -> None:
    expr, root = fused(refs[name]), refs[name][0].file.parent
    ready = trt_export(product(expr, bias=False))
    write_weights(ready, root, tmp_path / "weights.bin")
    found = torch.frombuffer(bytearray((tmp_path / "weights.bin").read_bytes()), dtype=torch.float)
    expected = materialise(expr, root, expr.dtype)
    assert torch.equal(found[: expected.numel()].view(expected.shape), expected)


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("bias", [False, True])
def test_product_with_integer_weights_reads_int8_and_any_other_is_exact(
    name: str, bias: bool, refs: dict[str, Refs], tmp_path: Path
) -> None:
    expr, root = fused(refs[name]), refs[name][0].file.parent
    model = product(expr, bias=bias)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    x = torch.randn(5, expr.shape[1])
    found = OnnxRuntimeSession(tmp_path / "model.onnx", root).run({"x": x})["y"] - 7.0 * bias
    values = torch.cat([read_values(refs[name][0]), 0.5 * read_values(refs[name][1])])
    expected = x @ values.T
    error = float((found - expected).norm() / expected.norm())
    assert (1e-4 < error < INT8) if name in PACKED else error < 1e-5
    made, arrays = with_packed_products(model, lambda e, p: integer_rows(e, p, root))
    assert {n.op_type for n in made.graph.node} == {"MatMulNBits" if name in PACKED else "Gemm"}
    assert bool(arrays) == (name in PACKED)
