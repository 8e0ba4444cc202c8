"""Products of the torch session with quantised weights that stay packed on CUDA."""

from __future__ import annotations

import warnings
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from tests.engine.torch.test_packed import expression
from trt_eagle3.engine import capi
from trt_eagle3.engine.torch import packed
from trt_eagle3.engine.torch.packed import Fp8Weight, PackedWeight
from trt_eagle3.engine.torch.program import load_program, only_factors
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.graph.activations import read_activations, write_activations
from trt_eagle3.graph.weights import (
    METADATA_KEY,
    WeightExpr,
    weight_initializer,
    write_descriptions,
)

BF16 = TensorProto.BFLOAT16


def model(expr: WeightExpr, *nodes: onnx.NodeProto) -> onnx.ModelProto:
    """``y = x @ weight.T``, and other nodes that read ``weight``."""
    product = helper.make_node("Gemm", ["x", "weight"], ["y"], transB=1)
    x, y = (
        helper.make_tensor_value_info(name, BF16, ["n", size])
        for name, size in zip(("x", "y"), reversed(expr.shape), strict=True)
    )
    graph = helper.make_graph(
        [product, *nodes], "product", [x], [y], initializer=[weight_initializer("weight", expr)]
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    write_descriptions(made, {"weight": expr})
    assert any(entry.key == METADATA_KEY for entry in made.metadata_props)
    return made


@pytest.mark.parametrize(
    "reader",
    [
        helper.make_node("Gemm", ["x", "weight", "bias"], ["z"], transB=1),
        helper.make_node("Gemm", ["weight", "x"], ["z"], transB=1),
        helper.make_node("Gemm", ["x", "weight"], ["z"]),
        helper.make_node("Add", ["weight", "weight"], ["z"]),
    ],
)
def test_a_weight_that_others_than_products_read_is_no_factor(
    reader: onnx.NodeProto, tmp_path: Path
) -> None:
    expr, _ = expression("fp8", tmp_path)
    assert only_factors(model(expr)) == {"weight"}
    assert only_factors(model(expr, reader)) == set()


@pytest.mark.parametrize("activations", ["compute", "fp8"])
def test_a_graph_says_what_its_products_read(activations: str, tmp_path: Path) -> None:
    expr, _ = expression("fp8", tmp_path)
    made = model(expr)
    write_activations(made, activations)
    assert read_activations(onnx.ModelProto.FromString(made.SerializeToString())) == activations


def test_a_weight_on_the_cpu_is_not_packed(tmp_path: Path) -> None:
    expr, root = expression("fp8", tmp_path)
    (tmp_path / "model.onnx").write_bytes(model(expr).SerializeToString())
    program = load_program(tmp_path / "model.onnx", root, (), torch.device("cpu"))
    assert isinstance(program.constants["weight"], torch.Tensor)


def test_a_session_with_several_packed_weights_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expr, root = expression("fp8", tmp_path)
    made = model(expr, helper.make_node("Gemm", ["x", "second"], ["z"], transB=1))
    made.graph.initializer.append(weight_initializer("second", expr))
    del made.metadata_props[:]
    write_descriptions(made, {"weight": expr, "second": expr})
    write_activations(made, "fp8")
    (tmp_path / "model.onnx").write_bytes(made.SerializeToString())
    monkeypatch.setattr(packed, "_capability", lambda: (8, 0))
    weight = Fp8Weight(torch.zeros(expr.shape).to(torch.float8_e4m3fn), torch.ones(1, 1))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        load_program(tmp_path / "model.onnx", root, (), torch.device("cpu"), lambda *_: weight)
    assert ["engine.activations" in str(warning.message) for warning in found] == [True]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["fp8", "fp8-channel", "modelopt-fp8", "int8", "w4a16", "awq", "gptq"]
)
def test_session_multiplies_with_the_packed_weight(name: str, tmp_path: Path) -> None:
    if not capi.available():
        pytest.skip("no CUDA device, or the kernel library is not built: make plugins")
    expr, root = expression(name, tmp_path)
    (tmp_path / "model.onnx").write_bytes(model(expr).SerializeToString())
    program = load_program(tmp_path / "model.onnx", root, (), torch.device("cuda"))
    assert isinstance(program.constants["weight"], PackedWeight)
    sessions = [TorchSession(tmp_path / "model.onnx", root, device=d) for d in ("cuda", "cpu")]
    for rows in (1, 16, 64, 200):
        x = torch.randn(rows, expr.shape[1]).bfloat16()
        ours, reference = (session.run({"x": x})["y"].cpu().double() for session in sessions)
        # two roundings of the output and of the weight; beyond 64 rows x may be FP8
        limit = 0.05 if name == "fp8" and rows > 64 else 2**-7
        assert (ours - reference).norm() / reference.norm() < limit
