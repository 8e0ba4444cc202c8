"""Quantised weights as tensors: as their formats define them, whoever makes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from onnx import helper
from safetensors.torch import save_file

from tests.quantised import PACKERS, pack
from trt_eagle3.checkpoint.model_config import ModelConfig
from trt_eagle3.checkpoint.quantised.read import open_weights
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.onnxruntime.session import OnnxRuntimeSession
from trt_eagle3.engine.runtime import weights
from trt_eagle3.engine.runtime.weights import materialise
from trt_eagle3.errors import UserError
from trt_eagle3.graph.weight_formats import format_of
from trt_eagle3.graph.weight_slices import take_columns, take_rows
from trt_eagle3.graph.weights import (
    METADATA_KEY,
    Quantised,
    WeightExpr,
    descriptions,
    part_of,
    weight_initializer,
    write_descriptions,
)
from trt_eagle3.parity.reference.dequantise import read_values

F32 = dtype_named("float32")
SHAPES = {"q": (256, 448), "k": (128, 448)}
Refs = list[QuantisedRef]


@pytest.fixture(scope="module")
def refs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Refs]:
    """Two weights of every format, in a file of each."""
    root = tmp_path_factory.mktemp("formats")
    drawn = torch.Generator().manual_seed(3)
    dense = {
        f"model.language_model.layers.0.self_attn.{p}_proj.weight": (
            torch.randn(shape, generator=drawn) * torch.rand(shape[0], 1, generator=drawn)
        )
        for p, shape in SHAPES.items()
    }
    found = {}
    for name, (packer, claim) in PACKERS.items():
        (root / name).mkdir()
        save_file(pack(dense, packer), root / name / "model.safetensors")
        config = ModelConfig({"quantization_config": claim}, root / name / "config.json")
        tensors, _ = open_weights(config, (("model.language_model.", ""),))
        both = [tensors[f"layers.0.self_attn.{p}_proj.weight"] for p in SHAPES]
        found[name] = [ref for ref in both if isinstance(ref, QuantisedRef)]
    return found


def fused(refs: Refs, scales: tuple[float, float] = (1.0, 0.5)) -> WeightExpr:
    parts = (part_of(ref, lambda r: r.file.name, s) for ref, s in zip(refs, scales, strict=True))
    return WeightExpr(tuple(parts), F32, format_of(refs))


def expected(refs: Refs) -> torch.Tensor:
    return torch.cat([read_values(refs[0]), 0.5 * read_values(refs[1])])


@pytest.mark.parametrize("name", PACKERS)
def test_materialise_quantised_weight_is_what_its_format_defines(
    name: str, refs: dict[str, Refs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_CHUNK_BYTES", 1 << 16)  # 36 rows: no multiple of 8
    expr, root = fused(refs[name]), refs[name][0].file.parent
    assert torch.equal(materialise(expr, root, F32), expected(refs[name]))


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("axis", [0, 1])
def test_materialise_slices_of_a_quantised_weight(
    name: str, axis: int, refs: dict[str, Refs]
) -> None:
    expr, root = fused(refs[name]), refs[name][0].file.parent
    values = expected(refs[name])
    for first, end in ((0, 64), (64, 100), (9, 128)):
        if axis:
            found, wanted = take_columns(expr, (first, end)), values[:, first:end]
        else:
            ranges = [(first, end), (256 + first, 256 + end)]
            found = take_rows(expr, ranges)
            wanted = torch.cat([values[slice(*taken)] for taken in ranges])
        assert torch.equal(materialise(found, root, F32), wanted)


@pytest.mark.parametrize("name", PACKERS)
def test_materialise_rows_of_a_quantised_weight(name: str, refs: dict[str, Refs]) -> None:
    expr, root = fused(refs[name]), refs[name][0].file.parent
    expr = replace(expr, parts=(replace(expr.parts[0], rows=(5, 77)),))
    assert torch.equal(materialise(expr, root, F32), expected(refs[name])[5:77])


@pytest.mark.parametrize("name", PACKERS)
def test_onnxruntime_makes_the_quantised_weight(
    name: str, refs: dict[str, Refs], tmp_path: Path
) -> None:
    expr, root = fused(refs[name]), refs[name][0].file.parent
    (tmp_path / "model.onnx").write_bytes(selection(expr).SerializeToString())
    session = OnnxRuntimeSession(tmp_path / "model.onnx", root)
    found = session.run({"rows": torch.arange(expr.shape[0])})["y"]
    torch.testing.assert_close(found, materialise(expr, root, F32), rtol=2e-7, atol=0)


def selection(expr: WeightExpr) -> onnx.ModelProto:
    """y = rows of the weight."""
    rows = helper.make_tensor_value_info("rows", onnx.TensorProto.INT64, ["n"])
    y = helper.make_tensor_value_info("y", expr.dtype.onnx, ["n", expr.shape[1]])
    node = helper.make_node("Gather", ["w", "rows"], ["y"], axis=0)
    graph = helper.make_graph([node], "g", [rows], [y], [weight_initializer("w", expr)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10)
    write_descriptions(model, {"w": expr})
    return model


@pytest.mark.parametrize("name", PACKERS)
def test_description_of_a_quantised_weight_is_read_back(name: str, refs: dict[str, Refs]) -> None:
    expr = fused(refs[name])
    assert descriptions(selection(expr)) == {"w": expr}


def test_description_whose_tensors_are_no_weight_of_its_format_is_refused(
    refs: dict[str, Refs],
) -> None:
    model = selection(fused(refs["awq"]))
    text = model.metadata_props[0].value.replace('"block":[1,64]', '"block":[1,32]')
    del model.metadata_props[:]
    model.metadata_props.add(key=METADATA_KEY, value=text)
    with pytest.raises(UserError, match=r"its scale: expected F32 or F16 or BF16 \[14, 256\]"):
        descriptions(model)


def test_part_without_what_its_format_needs_is_refused(refs: dict[str, Refs]) -> None:
    part = fused(refs["fp8"]).parts[0]
    assert part.quantised is not None
    bare = Quantised(part.quantised.shape, part.quantised.block, part.quantised.tensors[:1])
    with pytest.raises(ValueError, match="its scale is missing"):
        WeightExpr((replace(part, quantised=bare),), F32, "fp8")
    with pytest.raises(ValueError, match="expected dense, or quantised parts"):
        WeightExpr((replace(part, quantised=None),), F32, "fp8")


def test_weights_of_one_product_in_two_formats_are_refused(refs: dict[str, Refs]) -> None:
    with pytest.raises(UserError, match=r"expected weight format fp8 as .* got int8"):
        format_of([refs["fp8"][0], refs["int8"][1]])


def test_scale_that_makes_no_number_is_refused_by_name(
    refs: dict[str, Refs], tmp_path: Path
) -> None:
    ref = refs["fp8"][0]
    data = bytearray(ref.file.read_bytes())
    scale = ref.tensors["scale"]
    data[scale.offset : scale.offset + 4] = torch.tensor([float("nan")]).numpy().tobytes()
    (tmp_path / ref.file.name).write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"q_proj\.weight holds nan, which is no float32 value"):
        materialise(fused(refs["fp8"]), tmp_path, F32)
