"""What every graph file promises: valid ONNX, readable under opset 17 without our ops'
lowerings, no weight inside.
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from tests.reference.checkpoint import file_name, random_draft, write_tensors
from tests.reference.target import random_target
from tests.weight_exprs import no_integers
from trt_eagle3.config import EngineConfig
from trt_eagle3.drafts.eagle3.graph import draft_graph, fuse_graph
from trt_eagle3.dtype import COMPUTE_DTYPES
from trt_eagle3.errors import UserError
from trt_eagle3.families.qwen3_vl.vision_graph import vision_graph
from trt_eagle3.graph.build_graphs import build_graphs
from trt_eagle3.graph.builder import GraphBuilder
from trt_eagle3.graph.ops import DOMAIN, OPS, reference_function
from trt_eagle3.graph.target import target_graph
from trt_eagle3.graph.weight_nodes import with_weight_nodes
from trt_eagle3.graph.weights import DESCRIBED

GRAPHS = ("target", "vision", "fuse", "draft")
TENSORRT_8_OPSET = 17
INLINE_BYTES = 4096
"""No constant inside a graph is larger; the smallest file that would hold the test models'
weights is ten times it.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a stand-in at the place of described weights, which the ONNX checker asks for."""
    made = tmp_path_factory.mktemp("graphs")
    (made / DESCRIBED).touch()
    return made


@pytest.fixture(scope="module", params=[dtype.name for dtype in COMPUTE_DTYPES])
def models(folder: Path, request: pytest.FixtureRequest) -> dict[str, onnx.ModelProto]:
    """All graphs of a pair with every option on, stored in bfloat16, computed in each type."""
    spec = random_target(folder, text={"attention_bias": True}, stored=torch.bfloat16).spec
    options = dict.fromkeys(
        ("fc_norm", "norm_before_fc", "qk_norm", "attention_bias", "mlp_bias", "fc_bias"), True
    )
    manifest = random_draft(folder, num_layers=2, stored=torch.bfloat16, **options).manifest
    dtype = request.param
    return {
        "target": target_graph(spec, (0, 1, 3), True, dtype, 16, file_name),
        "vision": vision_graph(spec, dtype, file_name),
        "fuse": fuse_graph(manifest, dtype, file_name),
        "draft": draft_graph(manifest, dtype, 16, file_name),
    }


def without_lowerings(model: onnx.ModelProto) -> onnx.ModelProto:
    """What a reader of opset 17 that has our plugins is given; ``trt_export`` writes ``Gelu``
    out.
    """
    bare = copy.deepcopy(model)
    for node in bare.graph.node:
        if node.op_type == "Gelu":
            node.op_type = "Tanh"  # of the same type and shape
            del node.attribute[:]
    del bare.functions[:], bare.opset_import[:]
    bare.opset_import.extend(
        [helper.make_opsetid("", TENSORRT_8_OPSET), helper.make_opsetid(DOMAIN, 1)]
    )
    return bare


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_file_passes_the_full_onnx_check(
    models: dict[str, onnx.ModelProto], folder: Path, name: str
) -> None:
    path = folder / f"{name}.onnx"
    path.write_bytes(models[name].SerializeToString())
    onnx.checker.check_model(str(path), full_check=True)


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_with_weight_nodes_passes_the_full_onnx_check(
    models: dict[str, onnx.ModelProto], folder: Path, name: str
) -> None:
    model, _ = with_weight_nodes(models[name], no_integers)
    places = {e.value for t in model.graph.initializer for e in t.external_data}
    assert DESCRIBED not in places
    path = folder / f"{name}.nodes.onnx"
    path.write_bytes(model.SerializeToString())
    onnx.checker.check_model(str(path), full_check=True)


PREPARATION = {"Cast", "Concat", "Mul", "Transpose", "Slice"}


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_nodes_prepare_no_weight(models: dict[str, onnx.ModelProto], name: str) -> None:
    graph = models[name].graph
    weights = {t.name for t in graph.initializer if t.data_location == TensorProto.EXTERNAL}
    users = {node.op_type for node in graph.node if weights & set(node.input)}
    assert users
    assert not PREPARATION & users


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_without_lowerings_is_valid_under_opset_17(
    models: dict[str, onnx.ModelProto], folder: Path, name: str
) -> None:
    path = folder / f"{name}.bare.onnx"
    path.write_bytes(without_lowerings(models[name]).SerializeToString())
    onnx.checker.check_model(str(path), full_check=True)


def test_graph_with_a_node_that_opset_17_lacks_is_caught(
    models: dict[str, onnx.ModelProto], folder: Path
) -> None:
    bare = without_lowerings(models["fuse"])
    output = bare.graph.node[0].output[0]
    bare.graph.node.append(
        helper.make_node("RMSNormalization", [output, output], ["late"], epsilon=1e-6)
    )
    path = folder / "late.onnx"
    path.write_bytes(bare.SerializeToString())
    with pytest.raises(onnx.checker.ValidationError, match="RMSNormalization"):
        onnx.checker.check_model(str(path))


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_keeps_no_weight_bytes_inside(models: dict[str, onnx.ModelProto], name: str) -> None:
    inside = [t for t in models[name].graph.initializer if t.data_location != TensorProto.EXTERNAL]
    outside = [t for t in models[name].graph.initializer if t.data_location == TensorProto.EXTERNAL]
    assert outside
    assert sum(t.ByteSize() for t in inside) < INLINE_BYTES
    assert not any(t.raw_data or t.float_data for t in outside)


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_has_unique_names_and_a_lowering_for_every_op_of_ours(
    models: dict[str, onnx.ModelProto], name: str
) -> None:
    graph = models[name].graph
    outputs = [out for node in graph.node for out in node.output]
    assert len(outputs) == len(set(outputs))
    assert len({node.name for node in graph.node}) == len(graph.node)
    used = {(n.op_type, n.overload) for n in graph.node if n.domain == DOMAIN}
    assert used == {(f.name, f.overload) for f in models[name].functions}
    assert {n.domain for n in graph.node} <= {"", DOMAIN}


def test_graph_intermediates_that_parity_names_exist(models: dict[str, onnx.ModelProto]) -> None:
    outputs = {
        name: {o for node in m.graph.node for o in node.output} for name, m in models.items()
    }
    for layer in range(4):
        assert {f"layers.{layer}.output", f"layers.{layer}.attention_residual"} <= outputs["target"]
        assert {
            f"layers.{layer}.self_attn.{n}" for n in ("q", "k", "v", "out", "output")
        } <= outputs["target"]
    assert {"layers.0.output_pre_deepstack", "layers.1.output_pre_deepstack", "norm"} <= outputs[
        "target"
    ]
    assert {"patch_embed", "pos_embed", "blocks.0.output", "blocks.1.output"} <= outputs["vision"]
    assert {"input_norm", "fc_norm.0", "fc_norm.2", "features"} <= outputs["fuse"]
    assert {
        "embedding_and_hidden",
        "hidden_norm",
        "layers.0.output",
        "layers.1.output",
        "norm",
    } <= outputs["draft"]


def test_pair_graphs_without_a_draft_has_no_aux_output_and_no_draft(tmp_path: Path) -> None:
    spec = random_target(tmp_path).spec
    graphs = build_graphs(spec, None, EngineConfig(), file_name)
    assert set(graphs) == {"target", "vision"}
    assert "aux_hidden_states" not in {o.name for o in graphs["target"].graph.output}


@pytest.mark.parametrize("op_type", list(OPS))
def test_op_lowering_takes_and_makes_what_its_schema_says(op_type: str) -> None:
    op = OPS[op_type]
    assert op.inputs.keys() == op.outputs.keys() == op.attributes.keys() == op.lowering.keys()
    for overload in op.inputs:
        function = reference_function(op_type, overload)
        assert tuple(function.input) == op.inputs[overload]
        assert tuple(function.output) == op.outputs[overload]
        assert set(function.attribute) == set(op.attributes[overload])


def test_builder_references_one_weight_once_and_gives_repeated_names_a_number(
    tmp_path: Path,
) -> None:
    ref = write_tensors(tmp_path / "w.safetensors", {"w": torch.ones(3, 3)})["w"]
    b = GraphBuilder("g", "float32", file_name)
    x = b.input("x", TensorProto.FLOAT, ("n", 3))
    first, second = b.linear(x, [ref]), b.linear(x, [ref])
    b.output(second, "z", ("n", 3))
    model = b.build()
    assert [t.name for t in model.graph.initializer] == ["w.safetensors:w"]
    assert (first.name, second.name) == ("y", "y_2")
    assert [node.output[0] for node in model.graph.node] == ["y", "z"]


def test_builder_refuses_a_tensor_that_is_no_float(tmp_path: Path) -> None:
    ref = write_tensors(tmp_path / "w.safetensors", {"w": torch.ones(3, dtype=torch.int64)})["w"]
    with pytest.raises(
        UserError,
        match=r"w.safetensors: w: expected a float32, float16 or bfloat16 tensor, got I64",
    ):
        GraphBuilder("g", "float32", file_name).weight(ref)


def test_constants_of_one_name_are_one() -> None:
    """A second one of another content would be left out without a word."""
    builder = GraphBuilder("g", "float32", file_name)
    first = builder.constant(np.array([1.0, 2.0], dtype=np.float32), "rope.inv_freq")
    assert builder.constant(np.array([1.0, 2.0], dtype=np.float32), "rope.inv_freq") is first
    for other in (np.array([1.0, 3.0], dtype=np.float32), np.array([1.0, 2.0])):
        with pytest.raises(AssertionError, match=r"rope\.inv_freq: two constants"):
            builder.constant(other, "rope.inv_freq")
