"""Described weights as standard nodes: what ONNX Runtime makes of them, and what it holds."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from hypothesis import given, settings
from onnx import helper

from tests.weight_exprs import Case, cases, no_integers
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.onnxruntime.session import OnnxRuntimeSession
from trt_eagle3.engine.runtime.weights import materialise
from trt_eagle3.graph.weight_nodes import with_weight_nodes
from trt_eagle3.graph.weights import METADATA_KEY, weight_initializer, write_descriptions

# ONNX Runtime hands bfloat16 to nobody
DTYPES = (dtype_named("float32"), dtype_named("float16"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


def selection(case: Case) -> onnx.ModelProto:
    """y = rows of the weight; a described weight, or a stored one."""
    expr = case.expr
    rows = helper.make_tensor_value_info("rows", onnx.TensorProto.INT64, ["n"])
    y = helper.make_tensor_value_info("y", expr.dtype.onnx, ["n", expr.shape[1]])
    node = helper.make_node("Gather", ["w", "rows"], ["y"], axis=0)
    graph = helper.make_graph([node], "g", [rows], [y], [weight_initializer("w", expr)])
    opsets = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    write_descriptions(model, {"w": expr})
    return model


@given(case=cases(DTYPES))
@settings(max_examples=30, deadline=None)
def test_onnxruntime_makes_the_materialised_weight(root: Path, case: Case) -> None:
    case.write(root)
    (root / "model.onnx").write_bytes(selection(case).SerializeToString())
    session = OnnxRuntimeSession(root / "model.onnx", root)
    found = session.run({"rows": torch.arange(case.expr.shape[0])})["y"]
    assert torch.equal(found, materialise(case.expr, root, case.expr.dtype))


@given(case=cases())
@settings(max_examples=30, deadline=None)
def test_model_with_weight_nodes_is_plain_onnx_and_its_source_unchanged(
    root: Path, case: Case
) -> None:
    case.write(root)
    model = selection(case)
    before = model.SerializeToString()
    made, arrays = with_weight_nodes(model, no_integers)
    assert arrays == {}
    assert model.SerializeToString() == before
    assert METADATA_KEY not in {p.key for p in made.metadata_props}
    (root / "plain.onnx").write_bytes(made.SerializeToString())
    onnx.checker.check_model(str(root / "plain.onnx"), full_check=True)
