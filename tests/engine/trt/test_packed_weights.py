"""Quantised weights behind DequantizeLinear: which, and that ONNX Runtime makes the values of them
that every other backend has.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from tests.quantised import save_quantised
from tests.tiny import tiny_config
from trt_eagle3.engine.bundle.record import REFERENCE_ROOT, reference_location
from trt_eagle3.engine.runtime.weights import materialise
from trt_eagle3.engine.trt.packed_file import PACKED_FILE
from trt_eagle3.engine.trt.packed_weights import DequantizeLinearWeight, keep_packed
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.build_graphs import build_graphs
from trt_eagle3.graph.trt_export import TrtExport, trt_export

PRODUCTS = 8 * 4  # qkv, o, gate and up, down of each layer


def exported(folder: Path, kind: str, *, linear: bool = False, **engine: str) -> TrtExport:
    """The tiny target in format ``kind``, as it goes to TensorRT in float16."""
    options = {"backend": "tensorrt", "device": "cuda", "dtype": "float16", "residual": "compute"}
    config = tiny_config(engine={**options, **engine}, draft=None)
    spec = read_target(save_quantised(folder / kind, kind))
    model = build_graphs(spec, None, config.engine, reference_location)["target"]
    return trt_export(model, linear=linear)


def dequantisers(ready: TrtExport) -> list[onnx.NodeProto]:
    return [node for node in ready.model.graph.node if node.op_type == "DequantizeLinear"]


def values_of(ready: TrtExport, folder: Path) -> dict[str, np.ndarray]:
    """What ONNX Runtime makes of the nodes that were put in."""
    nodes = dequantisers(ready)
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "weights",
        [],
        [helper.make_tensor_value_info(n.output[0], TensorProto.FLOAT16, None) for n in nodes],
        [proto for proto in ready.model.graph.initializer if proto.name in used],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    (folder / "weights.onnx").write_bytes(model.SerializeToString())
    session = onnxruntime.InferenceSession(folder / "weights.onnx")
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {}), strict=True))


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("w4a16", 4), ("gptq", 4), ("int8", 8), ("fp8-channel", 8), ("modelopt-fp8", 8)],
)
def test_packed_weights_are_the_values_that_others_have(
    tmp_path: Path, kind: str, bits: int
) -> None:
    ready = exported(tmp_path, kind)
    packed = keep_packed(ready, REFERENCE_ROOT, tmp_path, fp8=True)
    values = values_of(packed, tmp_path)
    assert len(values) == PRODUCTS
    dtype = next(iter(ready.weights.values())).dtype
    for name, made in values.items():
        wanted = materialise(ready.weights[name], REFERENCE_ROOT, dtype)
        assert torch.equal(torch.from_numpy(made), wanted), name
    assert values.keys() | packed.weights.keys() == ready.weights.keys()
    dense = sum(expr.num_bytes for name, expr in ready.weights.items() if name in values)
    size = (tmp_path / PACKED_FILE).stat().st_size
    assert dense * bits / 16 < size < 1.2 * dense * bits / 16


@pytest.mark.parametrize("kind", ["w4a16-asymmetric", "awq", "gptq-act-order", "fp8"])
def test_weights_with_zero_points_another_order_or_blocks_are_dequantised(
    tmp_path: Path, kind: str
) -> None:
    ready = exported(tmp_path, kind)
    packed = keep_packed(ready, REFERENCE_ROOT, tmp_path, fp8=True)
    assert dequantisers(packed) == []
    assert packed.weights == ready.weights
    assert not (tmp_path / PACKED_FILE).exists()


def test_fp8_of_one_scale_a_row_is_dequantised_for_chips_without_it(tmp_path: Path) -> None:
    ready = exported(tmp_path, "fp8-channel")
    assert keep_packed(ready, REFERENCE_ROOT, tmp_path) is ready
    assert dequantisers(keep_packed(ready, REFERENCE_ROOT, tmp_path, fp8=True))


def test_factor_of_a_weight_is_in_its_scales(tmp_path: Path) -> None:
    """A float32 residual stream has 1/64 in the weights that add to it."""
    ready = exported(tmp_path, "w4a16", residual="float32")
    values = values_of(keep_packed(ready, REFERENCE_ROOT, tmp_path), tmp_path)
    factors = {part.scale for name in values for part in ready.weights[name].parts}
    assert factors == {1.0, 1 / 64}
    for name, made in values.items():
        wanted = materialise(ready.weights[name], REFERENCE_ROOT, ready.weights[name].dtype)
        assert torch.equal(torch.from_numpy(made), wanted), name


def test_scales_that_the_type_holds_with_fewer_digits_are_left(tmp_path: Path) -> None:
    ready = exported(tmp_path, "w4a16")
    name = next(name for name in ready.weights if name.endswith("layers.0.self_attn.qkv.weight"))
    small = tuple(replace(part, scale=2.0**-14) for part in ready.weights[name].parts)
    changed = {**ready.weights, name: replace(ready.weights[name], parts=small)}
    packed = keep_packed(replace(ready, weights=changed), REFERENCE_ROOT, tmp_path)
    assert len(dequantisers(packed)) == PRODUCTS - 1
    assert name in packed.weights


def test_weight_that_something_else_reads_is_dequantised(tmp_path: Path) -> None:
    ready = exported(tmp_path, "w4a16")
    product = next(n for n in ready.model.graph.node if "layers.0.self_attn.qkv" in n.name)
    ready.model.graph.node.append(
        helper.make_node("Identity", [product.input[1]], ["kept"], name="reader")
    )
    packed = keep_packed(ready, REFERENCE_ROOT, tmp_path)
    assert len(dequantisers(packed)) == PRODUCTS - 1
    assert product.input[1] in packed.weights


def test_four_bits_stand_two_in_a_byte_lower_half_first() -> None:
    codes = torch.tensor([[1, -8, 7, -1]], dtype=torch.int8)
    weight = DequantizeLinearWeight(TensorProto.INT4, codes, torch.ones(1, 2, dtype=torch.float16))
    assert weight.code_bytes() == bytes([0x81, 0xF7])
    assert weight.columns == 2
