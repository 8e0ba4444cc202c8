"""Products with quantised weights by our plugins: which, and that their bytes are the values that
every other backend has.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, external_data_helper, helper, numpy_helper
from torch import Tensor
from torch.nn import functional

from tests.engine.trt.test_packed_weights import PRODUCTS, exported
from tests.graph.test_trt_export import written
from trt_eagle3.engine.bundle import REFERENCE_ROOT
from trt_eagle3.engine.trt.packed_file import PACKED_FILE, packed_counts
from trt_eagle3.engine.trt.packed_products import keep_packed_products
from trt_eagle3.engine.weights import materialise
from trt_eagle3.graph.ops import DOMAIN, PLUGINS
from trt_eagle3.graph.plugin_ops import plugin_schemas
from trt_eagle3.graph.trt_export import TrtExport

KINDS = {
    "fp8": "LinearFp8",
    "fp8-channel": "LinearFp8",
    "w4a16": "LinearInt4",
    "w4a16-asymmetric": "LinearInt4",
    "awq": "LinearInt4",
    "gptq": "LinearInt4",
}


def products(ready: TrtExport) -> list[onnx.NodeProto]:
    return [n for n in ready.model.graph.node if n.op_type in {"LinearFp8", "LinearInt4"}]


def constants(ready: TrtExport, folder: Path) -> dict[str, Tensor]:
    """The constant inputs of the products, read from the file."""
    found = {}
    for proto in ready.model.graph.initializer:
        if any(e.key == "location" and e.value == PACKED_FILE for e in proto.external_data):
            external_data_helper.load_external_data_for_tensor(proto, str(folder))
            found[proto.name] = torch.from_numpy(np.array(numpy_helper.to_array(proto)))
    return found


def computed(node: onnx.NodeProto, x: Tensor, stored: dict[str, Tensor]) -> Tensor:
    own = {a.name: a.i for a in node.attribute if a.name == "scale_type"}
    inputs = [stored[name] for name in node.input[1:]]
    result: Tensor = PLUGINS[node.op_type].torch_function(x, *inputs, **own)
    return result


def kept(folder: Path, kind: str, **engine: str) -> tuple[TrtExport, TrtExport]:
    """The tiny target in format ``kind`` as it goes to TensorRT, and with products packed."""
    ready = exported(folder, kind, **engine)
    return ready, keep_packed_products(ready, REFERENCE_ROOT, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_products_are_those_of_the_dequantised_weights(tmp_path: Path, kind: str) -> None:
    ready, packed = kept(tmp_path, kind)
    stored, nodes = constants(packed, tmp_path), products(packed)
    # qkv, o, gate and up of each layer; of down K is no multiple of 128
    assert {(node.op_type, node.domain) for node in nodes} == {(KINDS[kind], "trt_eagle3")}
    assert len(nodes) == PRODUCTS * 3 // 4
    before = {node.output[0]: node for node in ready.model.graph.node}
    for node in nodes:
        weight = ready.weights[before[node.output[0]].input[1]]
        values = materialise(weight, REFERENCE_ROOT, weight.dtype)
        x = torch.randn(3, values.shape[1]).half()
        found = computed(node, x, stored)
        torch.testing.assert_close(found, functional.linear(x, values), rtol=2e-3, atol=2e-3)
    dense = set(ready.weights) - set(packed.weights)
    assert len(dense) == len(nodes)
    assert packed_counts(packed.model) == {KINDS[kind].removeprefix("Linear").lower(): len(nodes)}


@pytest.mark.parametrize("kind", ["fp8", "w4a16", "w4a16-asymmetric"])
def test_graph_with_packed_products_is_valid_and_of_opset_17(tmp_path: Path, kind: str) -> None:
    _, packed = kept(tmp_path, kind)
    made = plugin_schemas()
    for schema in made:
        onnx.defs.register_schema(schema)
    try:
        onnx.checker.check_model(str(written(packed, tmp_path)), check_custom_domain=True)
    finally:
        for schema in made:
            onnx.defs.deregister_schema(schema.name, schema.since_version, schema.domain)
    assert {o.domain: o.version for o in packed.model.opset_import} == {"": 17, DOMAIN: 1}


@pytest.mark.parametrize(("kind", "bits"), [("fp8-channel", 8), ("w4a16", 4)])
def test_file_of_packed_products_has_their_bits(tmp_path: Path, kind: str, bits: int) -> None:
    ready, packed = kept(tmp_path, kind)
    gone = ready.weights.keys() - packed.weights.keys()
    dense = sum(ready.weights[name].num_bytes for name in gone)
    size = (tmp_path / PACKED_FILE).stat().st_size
    assert dense * bits / 16 < size < 1.2 * dense * bits / 16


@pytest.mark.parametrize("kind", ["gptq-act-order", "int8", "modelopt-nvfp4"])
def test_formats_that_no_plugin_takes_are_dequantised(tmp_path: Path, kind: str) -> None:
    ready, packed = kept(tmp_path, kind)
    assert packed is ready
    assert not (tmp_path / PACKED_FILE).exists()


def test_products_of_the_linear_plugin_are_packed_too(tmp_path: Path) -> None:
    """As TensorRT 8.6 has them, whose other products are a plugin's."""
    _, packed = kept(tmp_path, "fp8")
    linear = tmp_path / "linear"
    again = keep_packed_products(exported(linear, "fp8", linear=True), REFERENCE_ROOT, linear)
    assert [n.input[1:] for n in products(again)] == [n.input[1:] for n in products(packed)]
    assert (linear / PACKED_FILE).read_bytes() == (tmp_path / PACKED_FILE).read_bytes()


def test_factor_of_a_packed_product_is_in_its_scales(tmp_path: Path) -> None:
    """A float32 residual stream has 1/64 in the weights that add to it."""
    ready, packed = kept(tmp_path, "w4a16", residual="float32")
    stored = constants(packed, tmp_path)
    before = {node.output[0]: node for node in ready.model.graph.node}
    factors = set()
    for node in products(packed):
        weight = ready.weights[before[node.output[0]].input[1]]
        factors |= {part.scale for part in weight.parts}
        x = torch.eye(weight.shape[1]).half()
        values = materialise(weight, REFERENCE_ROOT, weight.dtype)
        assert torch.equal(computed(node, x, stored).T, values), node.name
    assert factors == {1.0, 1 / 64}


def test_values_that_the_type_does_not_hold_are_left_to_the_weights_own_check(
    tmp_path: Path,
) -> None:
    ready = exported(tmp_path, "fp8-channel")
    name = next(name for name in ready.weights if name.endswith("layers.0.self_attn.qkv.weight"))
    large = tuple(replace(part, scale=2.0**20) for part in ready.weights[name].parts)
    changed = {**ready.weights, name: replace(ready.weights[name], parts=large)}
    packed = keep_packed_products(replace(ready, weights=changed), REFERENCE_ROOT, tmp_path)
    assert name in packed.weights
    assert len(products(packed)) == PRODUCTS * 3 // 4 - 1


def test_weight_that_something_else_reads_stays_whole(tmp_path: Path) -> None:
    ready = exported(tmp_path, "fp8")
    product = next(n for n in ready.model.graph.node if "layers.0.self_attn.qkv" in n.name)
    ready.model.graph.node.append(
        helper.make_node("Identity", [product.input[1]], ["kept"], name="reader")
    )
    packed = keep_packed_products(ready, REFERENCE_ROOT, tmp_path)
    assert product.input[1] in packed.weights
    assert len(products(packed)) == PRODUCTS * 3 // 4 - 1


def test_codes_lie_four_and_eight_in_an_int32(tmp_path: Path) -> None:
    for kind, per_word in (("fp8", 4), ("w4a16-asymmetric", 8)):
        ready, packed = kept(tmp_path, kind)
        node = products(packed)[0]
        before = next(n for n in ready.model.graph.node if n.output[0] == node.output[0])
        rows, inner = ready.weights[before.input[1]].shape
        shapes = {i.name: (i.data_type, list(i.dims)) for i in packed.model.graph.initializer}
        assert shapes[node.input[1]] == (TensorProto.INT32, [rows, inner // per_word])
        if kind != "fp8":
            assert shapes[node.input[2]] == (TensorProto.INT32, [rows // 2, inner // 64])
            assert shapes[node.input[3]] == (TensorProto.INT32, [rows // 4, inner // 64])
