"""Graphs for TensorRT: what is in them is valid and computes what the graph they come from
computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from tests.graph.plugin_schemas import plugin_schemas
from tests.moe import save_qwen3_moe
from tests.reference.compare import FLOAT32_TOLERANCE
from tests.tiny import DRAFT, TARGET
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.builder.weight_file import write_weights
from trt_eagle3.engine.bundle.record import REFERENCE_ROOT, reference_location
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.errors import UserError
from trt_eagle3.families.qwen3_vl.vision_rows import vision_rows
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.build_graphs import build_graphs
from trt_eagle3.graph.ops import DOMAIN, EVERY_OP, OPS
from trt_eagle3.graph.plugin_ops import PLUGIN_VERSION
from trt_eagle3.graph.residual import WIDE_SCALE
from trt_eagle3.graph.trt_export import (
    WEIGHTS_FILE,
    TrtExport,
    check_plugins,
    float32_nodes,
    trt_export,
)
from trt_eagle3.parity.metrics import relative_error

GRAPHS = ("target", "vision", "fuse", "draft")
NEW_OPS = {"Attention", "RMSNormalization", "RotaryEmbedding", "CastLike"}
ROWS, SLOTS = 5, 64
# Rounding of float16 through eight layers, of which each rounds a few times 2^-11: measured 2e-3 on
# these inputs.
FLOAT16_TOLERANCE = 1e-2


def graphs(dtype: str = "float16", residual: str = "compute") -> dict[str, onnx.ModelProto]:
    spec = read_target(TARGET)
    engine = EngineConfig.model_validate(
        {"backend": "tensorrt", "dtype": dtype, "residual": residual}
    )
    return build_graphs(spec, read_draft(DRAFT, spec), engine, reference_location)


@pytest.fixture(autouse=True)
def schemas() -> Iterator[None]:
    with plugin_schemas():
        yield


def written(ready: TrtExport, folder: Path) -> Path:
    write_weights(ready, REFERENCE_ROOT, folder / WEIGHTS_FILE)
    (folder / "model.onnx").write_bytes(ready.model.SerializeToString())
    return folder / "model.onnx"


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_model_is_opset_17_with_plugin_nodes_and_no_functions(
    graph: str, dtype: str, linear: bool, tmp_path: Path
) -> None:
    ready = trt_export(graphs(dtype)[graph], linear=linear)
    file = written(ready, tmp_path)
    onnx.checker.check_model(str(file), full_check=dtype != "bfloat16", check_custom_domain=True)
    assert {o.domain: o.version for o in ready.model.opset_import} == {"": 17, DOMAIN: 1}
    assert not ready.model.functions
    assert not NEW_OPS & {node.op_type for node in ready.model.graph.node}
    assert not any(node.op_type == "Shape" and node.attribute for node in ready.model.graph.node)


def test_schema_refuses_a_plugin_node_without_its_attributes(tmp_path: Path) -> None:
    ready = trt_export(graphs()["draft"])
    node = next(n for n in ready.model.graph.node if n.op_type == "TreeAttention")
    del node.attribute[:]
    with pytest.raises(onnx.checker.ValidationError, match="Required attribute"):
        onnx.checker.check_model(str(written(ready, tmp_path)), check_custom_domain=True)


def test_every_op_of_ours_is_a_plugin_node_that_knows_its_types() -> None:
    model = trt_export(graphs(residual="float32")["target"]).model
    ours = [node for node in model.graph.node if node.domain == DOMAIN]
    without = {"VisionAttention", "FusedMoe", "GatedDelta"}
    assert {node.op_type for node in ours} == set(OPS) - without
    vision = trt_export(graphs()["vision"]).model
    assert {node.op_type for node in vision.graph.node if node.domain == DOMAIN} == {
        "VisionAttention"
    }
    norms = [
        {a.name: onnx.helper.get_attribute_value(a) for a in n.attribute}
        for n in ours
        if n.op_type == "AddRmsNorm"
    ]
    assert {n["compute_type"] for n in norms} == {TensorProto.FLOAT16}
    assert (norms[0]["num_outputs"], norms[0]["x_type"]) == (1, TensorProto.FLOAT)
    assert {n["residual_type"] for n in norms if n["num_outputs"] == 2} == {TensorProto.FLOAT}


def products(model: onnx.ModelProto, op_type: str) -> dict[str, onnx.NodeProto]:
    return {n.name.rpartition("/")[0]: n for n in model.graph.node if n.op_type == op_type}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("graph", "count"), [("target", 8 * 4 + 1), ("draft", 5), ("fuse", 1), ("vision", 0)]
)
def test_products_without_a_bias_become_linear_plugins_where_asked_for(
    graph: str, count: int, dtype: str
) -> None:
    model = graphs(dtype)[graph]
    plain, ready = trt_export(model), trt_export(model, linear=True)
    before, left, taken = (
        products(plain.model, "Gemm"),
        products(ready.model, "Gemm"),
        products(ready.model, "Linear"),
    )
    assert not products(plain.model, "Linear")
    assert len(taken) == count
    assert before.keys() == left.keys() | taken.keys()
    assert all(len(node.input) == 3 for node in left.values())
    shapes = {name: expr.shape for name, expr in ready.weights.items()}
    for name, node in taken.items():
        assert (list(node.input), list(node.output)) == (
            list(before[name].input),
            list(before[name].output),
        )
        assert len(shapes[node.input[1]]) == 2
        own = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        compute = getattr(TensorProto, dtype.upper())
        assert own == {
            "plugin_version": PLUGIN_VERSION.encode(),
            "plugin_namespace": b"",
            "compute_type": compute,
        }
    assert (ready.offsets, ready.weights) == (plain.offsets, plain.weights)


@pytest.mark.parametrize("graph", ["target", "draft", "fuse"])
def test_linear_plugins_compute_what_the_graph_did(graph: str, tmp_path: Path) -> None:
    inputs, model = inputs_of(graph, torch.float16), graphs("float16")[graph]
    found = {}
    for name, linear in (("plain", False), ("linear", True)):
        (tmp_path / name).mkdir()
        ready = trt_export(model, linear=linear)
        written(ready, tmp_path / name)
        found[name] = run(ready.model, tmp_path / name, tmp_path / name, inputs)
    for name, value in found["plain"].items():
        assert torch.equal(found["linear"][name], value), name


def test_experts_become_a_plugin(tmp_path: Path) -> None:
    save_qwen3_moe(tmp_path)
    engine = EngineConfig.model_validate({"backend": "tensorrt"})
    model = build_graphs(read_target(tmp_path), None, engine, reference_location)["target"]
    ready = trt_export(model, linear=True)
    (node, *others) = (node for node in ready.model.graph.node if node.op_type == "FusedMoe")
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert {k: values[k] for k in ("top_k", "renormalise", "compute_type")} == {
        "top_k": 2,
        "renormalise": 1,
        "compute_type": TensorProto.FLOAT16,
    }
    assert [ready.weights[name].shape for name in node.input[2:]] == [(5, 40, 24), (5, 24, 20)]
    assert len(others) == 2
    assert ready.intermediates == tuple(f"layers.{k}.mlp.router_logits" for k in range(3))
    assert node.input[1] == ready.intermediates[0]
    *_, last = ready.model.graph.output
    assert last.name == ready.intermediates[-1]
    assert last.type.tensor_type.elem_type == TensorProto.FLOAT16
    assert [d.dim_param or d.dim_value for d in last.type.tensor_type.shape.dim] == ["num_rows", 5]


def test_dense_target_has_no_outputs_for_validation() -> None:
    model = graphs()["target"]
    ready = trt_export(model)
    assert ready.intermediates == ()
    assert ready.model.graph.output == model.graph.output


def op_graph(
    op_type: str,
    shapes: dict[str, tuple[int, ...]],
    dtype: int = TensorProto.FLOAT16,
    **values: int,
) -> onnx.ModelProto:
    """A node of an op of ours over constants with ``shapes``."""
    names = EVERY_OP[op_type].inputs[""]
    node = onnx.helper.make_node(
        op_type, names, EVERY_OP[op_type].outputs[""], name="layer/op", domain=DOMAIN, **values
    )
    fixed = [
        numpy_helper.from_array(np.zeros(shape, np.float32), name) for name, shape in shapes.items()
    ]
    x = onnx.helper.make_tensor_value_info(names[0], dtype, ["n", "width"])
    return onnx.helper.make_model(onnx.helper.make_graph([node], "g", [x], [], fixed))


GATED = {"num_k_heads": 1, "num_v_heads": 1}
DELTA_SHAPES = {"delta_state": (2, 1, 8, 12), "conv_weight": (28, 1, 4)}
REFUSED = {
    "heads of a tower": (
        op_graph("VisionAttention", {"inv_freq": (68,)}, num_heads=2),
        "heads have 136 channels, expected a multiple of 4, at most 128",
    ),
    "uneven heads of a tower": (
        op_graph("VisionAttention", {"inv_freq": (37,)}, num_heads=2),
        "heads have 74 channels, expected a multiple of 4",
    ),
    "heads of a decoder": (
        op_graph("QKNormMRope", {}, head_dim=260, num_heads=2, num_kv_heads=1),
        "heads have 260 channels, expected a multiple of 4, at most 256",
    ),
    "experts in float32": (
        op_graph("FusedMoe", {"down": (8, 64, 48)}, TensorProto.FLOAT, top_k=2, renormalise=1),
        "experts in float32 are not supported, set engine.dtype: float16",
    ),
    "experts' width": (
        op_graph("FusedMoe", {"down": (8, 64, 20)}, top_k=2, renormalise=1),
        "experts' width: expected a multiple of 8, got 20",
    ),
    "too many experts": (
        op_graph("FusedMoe", {"down": (513, 16, 8)}, top_k=2, renormalise=1),
        "expected at most 512 experts, got 513",
    ),
    "too many experts of a row": (
        op_graph("FusedMoe", {"down": (32, 16, 8)}, top_k=17, renormalise=1),
        "expected at most 16 experts of a row, got 17",
    ),
    "linear heads": (
        op_graph("GatedDelta", DELTA_SHAPES | {"delta_state": (2, 1, 8, 132)}, **GATED),
        "linear heads have 132 channels, expected a multiple of 4, at most 128",
    ),
    "taps": (
        op_graph("GatedDelta", DELTA_SHAPES | {"conv_weight": (28, 1, 9)}, **GATED),
        "expected 2 to 8 taps, got 9",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_node_that_no_plugin_supports_is_refused_by_name(case: str) -> None:
    model, reason = REFUSED[case]
    plugin = model.graph.node[0].op_type
    with pytest.raises(UserError) as refused:
        check_plugins(model)
    assert f"layer/op: TensorRT's plugin {plugin}: {reason}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_supported_nodes_are_not_refused() -> None:
    check_plugins(op_graph("GatedDelta", DELTA_SHAPES, **GATED))
    for model in graphs().values():
        check_plugins(model)


def product_graph(
    k: int, dtype: int = TensorProto.FLOAT16, **attributes: object
) -> onnx.ModelProto:
    """y = x . weight^T for a weight on disk."""
    item = 4 if dtype == TensorProto.FLOAT else 2
    weight = TensorProto(
        name="weight", data_type=dtype, dims=(48, k), data_location=TensorProto.EXTERNAL
    )
    for key, value in {"location": "w.bin", "offset": 0, "length": 48 * k * item}.items():
        weight.external_data.add(key=key, value=str(value))
    node = onnx.helper.make_node("Gemm", ["x", "weight"], ["y"], name="y/Gemm", **attributes)
    x, y = (
        onnx.helper.make_tensor_value_info(n, dtype, ["n", s]) for n, s in (("x", k), ("y", 48))
    )
    return onnx.helper.make_model(onnx.helper.make_graph([node], "product", [x], [y], [weight]))


@pytest.mark.parametrize(
    ("model", "op_type"),
    [
        (product_graph(64, transB=1), "Linear"),
        (product_graph(64, TensorProto.BFLOAT16, transB=1), "Linear"),
        (product_graph(48, transB=1), "Gemm"),  # K is no multiple of 32
        (product_graph(64, TensorProto.FLOAT, transB=1), "Gemm"),
        (product_graph(64, transB=1, alpha=0.5), "Gemm"),
        (product_graph(48), "Gemm"),  # square, not transposed
    ],
)
def test_linear_takes_only_what_its_kernel_computes(model: onnx.ModelProto, op_type: str) -> None:
    assert [n.op_type for n in trt_export(model, linear=True).model.graph.node] == [op_type]


@pytest.mark.parametrize("residual", ["compute", "float32"])
def test_float32_nodes_are_the_same_with_linear_plugins(residual: str) -> None:
    model = graphs(residual=residual)["target"]
    expected = float32_nodes(trt_export(model).model)
    assert expected
    assert float32_nodes(trt_export(model, linear=True).model) == expected


def test_weights_are_of_the_engines_type_and_fused(tmp_path: Path) -> None:
    ready = trt_export(graphs()["target"])
    assert {str(expr.dtype) for expr in ready.weights.values()} == {"float16"}
    assert not {"Cast", "Concat"} & {
        n.op_type for n in ready.model.graph.node if n.input[0] in ready.offsets
    }
    qkv = ready.weights["layers.0.self_attn.qkv.weight"]
    assert qkv.shape == (8 * 64, 256)
    assert len(qkv.parts) == 3
    assert [p.name for p in qkv.parts] == [
        f"model.language_model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"
    ]
    written(ready, tmp_path)
    assert not any(
        reference_location(next(iter(read_target(TARGET).tensors.values()))) in name
        for name in ready.weights
    )
    assert (tmp_path / WEIGHTS_FILE).stat().st_size <= ready.weight_bytes + 256 * len(ready.weights)


def inputs_of(graph: str, dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(0)
    if graph == "fuse":
        return {"aux_hidden_states": torch.randn(ROWS, 3 * 256, dtype=dtype)}
    if graph == "vision":
        grid = torch.tensor([[1, 4, 6], [2, 2, 8]])
        patches = torch.randn(int(grid.prod(1).sum()), 1536, dtype=dtype)
        return {"patches": patches, **vision_rows(grid, 2, 8).inputs()}
    layers = 8 if graph == "target" else 1
    caches = {
        f"{side}_cache.{i}": torch.randn(SLOTS, 2, 64, dtype=dtype)
        for side in "kv"
        for i in range(layers)
    }
    extra = {"deepstack_embeds": torch.randn(3, 2, ROWS, 256, dtype=dtype)}
    if graph == "draft":
        extra = {"features": torch.randn(2, ROWS, 256, dtype=dtype)}
    return {
        "inputs_embeds": torch.randn(2, ROWS, 256, dtype=dtype),
        **extra,
        **caches,
        "position_ids": torch.randint(0, 500, (3, 2, ROWS), dtype=torch.int32),
        "past_lengths": torch.tensor([9, 3], dtype=torch.int32),
        "query_lengths": torch.tensor([ROWS, 4], dtype=torch.int32),
        "page_table": torch.tensor([[3, 1], [2, 0]], dtype=torch.int32),
        "tree_mask": torch.ones(ROWS, ROWS, dtype=torch.bool).tril().expand(2, -1, -1).contiguous(),
        "logit_rows": torch.tensor([[0, ROWS - 1], [3, 1]], dtype=torch.int32),
    }


def run(
    model: onnx.ModelProto, folder: Path, root: Path, inputs: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The graph in the torch session, plugin nodes without what is there for TensorRT alone."""
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    for node in plain.graph.node:
        if node.op_type == "Linear":  # there for TensorRT alone
            node.CopyFrom(
                onnx.helper.make_node("Gemm", node.input, node.output, name=node.name, transB=1)
            )
        if node.domain == DOMAIN:
            own = set().union(*EVERY_OP[node.op_type].attributes.values())
            kept = [a for a in node.attribute if a.name in own]
            del node.attribute[:]
            node.attribute.extend(kept)
    folder.mkdir(exist_ok=True)
    (folder / "session.onnx").write_bytes(plain.SerializeToString())
    return TorchSession(folder / "session.onnx", root).run(
        {n: t.clone() for n, t in inputs.items()}
    )


@pytest.mark.parametrize("graph", GRAPHS)
def test_rewritten_graph_computes_the_same_bits(graph: str, tmp_path: Path) -> None:
    model, inputs = graphs("float32")[graph], inputs_of(graph, torch.float32)
    expected = run(model, tmp_path / "plain", REFERENCE_ROOT, inputs)
    ready = trt_export(model)
    written(ready, tmp_path)
    found = run(ready.model, tmp_path, tmp_path, inputs)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if graph == "vision":  # Gelu is written out, in another order of the same steps
            assert relative_error(found[name], value) < FLOAT32_TOLERANCE, name
        else:
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_gelu_written_out_computes_gelu(approximate: str, tmp_path: Path) -> None:
    x, y = (onnx.helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n"]) for n in "xy")
    node = onnx.helper.make_node("Gelu", ["x"], ["y"], name="y/Gelu", approximate=approximate)
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "gelu", [x], [y]))
    made = trt_export(model).model
    assert "Gelu" not in {n.op_type for n in made.graph.node}
    values = torch.linspace(-12, 12, 4001)
    found = run(made, tmp_path, tmp_path, {"x": values})["y"]
    expected = torch.nn.functional.gelu(values.double(), approximate=approximate)
    assert (found - expected).abs().max() < 1e-6  # a few roundings of values up to 12


@pytest.mark.parametrize("pads", [[0, 2, 0, -2], [0, -1, 0, 3], [-1, 0, 1, -2]])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_pads_that_remove_rows_become_pads_and_slices(pads: list[int], count: int) -> None:
    x, y = (onnx.helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", "m"]) for n in "xy")
    node = onnx.helper.make_node("Pad", ["x", "pads"], ["y"], name="y/Pad")
    constant = onnx.numpy_helper.from_array(np.array(pads, dtype=np.int64), "pads")
    graph = onnx.helper.make_graph([node], "pad", [x], [y], [constant])
    made = trt_export(onnx.helper.make_model(graph)).model
    given = {p.name: onnx.numpy_helper.to_array(p) for p in made.graph.initializer}
    assert all((given[n.input[1]] >= 0).all() for n in made.graph.node if n.op_type == "Pad")
    values = torch.arange(3.0 * (count + 2)).reshape(3, -1) + 1
    (found,) = ReferenceEvaluator(made).run(None, {"x": values.numpy()})
    before, left, after, right = pads
    expected = torch.nn.functional.pad(values, (left, right, before, after))
    assert torch.equal(torch.from_numpy(found), expected)


def test_float32_residual_computes_what_the_compute_type_does(tmp_path: Path) -> None:
    inputs = inputs_of("target", torch.float32)
    expected = run(graphs("float32")["target"], tmp_path / "plain", REFERENCE_ROOT, inputs)
    half = {n: t.half() if t.dtype == torch.float32 else t for n, t in inputs.items()}
    ready = trt_export(graphs(residual="float32")["target"])
    written(ready, tmp_path)
    found = run(ready.model, tmp_path, tmp_path, half)
    for name in ("logits", "aux_hidden_states"):
        real = 4 if name == "aux_hidden_states" else None  # the second row's fifth token is padding
        assert (
            relative_error(found[name].float()[:, :real], expected[name][:, :real])
            < FLOAT16_TOLERANCE
        ), name


def test_residual_beyond_float16_is_held_in_float32_and_its_aux_states_saturate(
    tmp_path: Path,
) -> None:
    """A stream of 4e5: garbage in float16, and what float32 computes with ``residual: float32``."""
    large = inputs_of("target", torch.float32)
    large["inputs_embeds"] = 6e4 * torch.sign(large["inputs_embeds"])
    large["deepstack_embeds"] = 6e4 * torch.ones_like(large["deepstack_embeds"])
    expected = run(graphs("float32")["target"], tmp_path / "plain", REFERENCE_ROOT, large)
    half = {n: t.half() if t.dtype == torch.float32 else t for n, t in large.items()}
    narrow, wide = trt_export(graphs()["target"]), trt_export(graphs(residual="float32")["target"])
    for ready, name in ((narrow, "narrow"), (wide, "wide")):
        (tmp_path / name).mkdir()
        written(ready, tmp_path / name)
    garbage = run(narrow.model, tmp_path / "narrow", tmp_path / "narrow", half)["logits"]
    assert not torch.isfinite(garbage).all() or relative_error(garbage, expected["logits"]) > 0.1
    found = run(wide.model, tmp_path / "wide", tmp_path / "wide", half)
    assert relative_error(found["logits"], expected["logits"]) < FLOAT16_TOLERANCE
    assert float(found["aux_hidden_states"].abs().max()) == torch.finfo(torch.float16).max


def test_projections_that_write_to_a_wide_stream_are_scaled() -> None:
    weights = trt_export(graphs(residual="float32")["target"]).weights
    up = next(w for name, w in weights.items() if "gate_up" in name)
    assert [p.scale for p in up.parts] == [1.0, WIDE_SCALE]
    scaled = [w for w in weights.values() if "o_proj" in w.parts[0].name]
    assert len(scaled) == 8
    assert all(w.parts[0].scale == WIDE_SCALE for w in scaled)


def test_float32_nodes_are_those_of_the_wide_stream_and_the_logits() -> None:
    assert float32_nodes(trt_export(graphs()["target"]).model) == {"cast/Cast"}  # the logits
    wide = float32_nodes(trt_export(graphs(residual="float32")["target"]).model)
    assert {"embeds_stream/Mul", "layers.0.output/Add", "aux.1_clipped/Clip"} <= wide
    assert not any(name.endswith(("/Gemm", "/Sigmoid")) for name in wide)
    # its angles are inside VisionAttention
    assert not float32_nodes(trt_export(graphs()["vision"]).model)
