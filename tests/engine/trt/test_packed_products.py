"""Products with quantised weights by our plugins: which, and that their bytes are the values that
every other backend has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, external_data_helper, helper, numpy_helper
from torch import Tensor

from tests.engine.trt.test_packed_weights import PRODUCTS, exported
from tests.graph.plugin_schemas import plugin_schemas
from tests.graph.test_trt_export import FLOAT16_TOLERANCE, inputs_of, run, written
from trt_eagle3.engine.bundle.record import REFERENCE_ROOT
from trt_eagle3.engine.runtime.weights import materialise
from trt_eagle3.engine.trt.packed_file import PACKED_FILE, packed_counts
from trt_eagle3.engine.trt.packed_products import keep_packed_products
from trt_eagle3.graph.ops import DOMAIN, EVERY_OP
from trt_eagle3.graph.trt_export import TrtExport
from trt_eagle3.graph.weights import WeightExpr
from trt_eagle3.parity.metrics import relative_error

KINDS = {
    "fp8": "LinearFp8",
    "fp8-channel": "LinearFp8",
    "int8": "LinearInt8",
    "w4a16": "LinearInt4",
    "w4a16-asymmetric": "LinearInt4",
}


@dataclass(frozen=True)
class Kept:
    """The tiny target as it goes to TensorRT, and with products packed into ``folder``."""

    ready: TrtExport
    packed: TrtExport
    folder: Path


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kept]:
    @cache
    def make(kind: str) -> Kept:
        folder = tmp_path_factory.mktemp(kind)
        ready = exported(folder, kind, residual="float32")
        return Kept(ready, keep_packed_products(ready, REFERENCE_ROOT, folder), folder)

    return make


def products(ready: TrtExport) -> list[onnx.NodeProto]:
    return [n for n in ready.model.graph.node if n.op_type in set(KINDS.values())]


def constants(case: Kept) -> dict[str, Tensor]:
    """The constant inputs of the products, read from the file into the model."""
    found = {}
    for proto in case.packed.model.graph.initializer:
        if any(e.key == "location" and e.value == PACKED_FILE for e in proto.external_data):
            external_data_helper.load_external_data_for_tensor(proto, str(case.folder))
        if proto.name.endswith(("/codes", "/scales", "/zero_points")):
            found[proto.name] = torch.from_numpy(np.array(numpy_helper.to_array(proto)))
    return found


def computed(node: onnx.NodeProto, x: Tensor, stored: dict[str, Tensor]) -> Tensor:
    own = {a.name: a.i for a in node.attribute if a.name == "scale_type"}
    inputs = [stored[name] for name in node.input[1:]]
    result: Tensor = EVERY_OP[node.op_type].torch_function(x, *inputs, **own)
    return result


def whole(case: Kept, node: onnx.NodeProto) -> WeightExpr:
    """The weight that ``node`` multiplies with, before it was packed."""
    before = next(n for n in case.ready.model.graph.node if n.output[0] == node.output[0])
    return case.ready.weights[before.input[1]]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_products_are_those_of_the_dequantised_weights(
    kept: Callable[[str], Kept], kind: str
) -> None:
    case = kept(kind)
    stored, nodes = constants(case), products(case.packed)
    # qkv, o, gate and up of each layer; of down K is no multiple of 128
    assert {(node.op_type, node.domain) for node in nodes} == {(KINDS[kind], DOMAIN)}
    assert len(nodes) == PRODUCTS * 3 // 4
    factors = set()
    for node in nodes:
        weight = whole(case, node)
        factors |= {part.scale for part in weight.parts}
        values = materialise(weight, REFERENCE_ROOT, weight.dtype)
        assert torch.equal(computed(node, torch.eye(values.shape[1]).half(), stored).T, values)
    assert factors == {1.0, 1 / 64}  # of a float32 residual stream, in the scales
    gone = case.ready.weights.keys() - case.packed.weights.keys()
    assert len(gone) == len(nodes)
    type_name = KINDS[kind].removeprefix("Linear").lower()
    assert packed_counts(case.packed.model) == {type_name: len(nodes)}
    dense = sum(case.ready.weights[name].num_bytes for name in gone)
    least = dense * int(type_name[-1]) / 16
    assert least < (case.folder / PACKED_FILE).stat().st_size < 1.2 * least


@pytest.mark.parametrize("kind", ["fp8", "w4a16-asymmetric"])
def test_graph_with_packed_products_is_valid_and_of_opset_17(
    kept: Callable[[str], Kept], kind: str
) -> None:
    case = kept(kind)
    with plugin_schemas():
        file = written(case.packed, case.folder)
        onnx.checker.check_model(str(file), check_custom_domain=True)
    assert {o.domain: o.version for o in case.packed.model.opset_import} == {"": 17, DOMAIN: 1}


@pytest.mark.parametrize("kind", ["fp8", "w4a16-asymmetric"])
def test_graph_with_packed_products_computes_what_the_dequantised_one_does(
    kept: Callable[[str], Kept], tmp_path: Path, kind: str
) -> None:
    """By the torch functions of the plugins, over what lies in the file."""
    case, inputs = kept(kind), inputs_of("target", torch.float16)
    written(case.ready, tmp_path)
    expected = run(case.ready.model, tmp_path, tmp_path, inputs)["logits"]
    written(case.packed, case.folder)
    constants(case)
    faulty = onnx.ModelProto()
    faulty.CopyFrom(case.packed.model)
    found = run(case.packed.model, case.folder, case.folder, inputs)["logits"]
    assert relative_error(found, expected) < FLOAT16_TOLERANCE
    node = products(case.packed)[0]
    codes = next(i for i in faulty.graph.initializer if i.name == node.input[1])
    row = 4 * codes.dims[1]
    codes.raw_data = codes.raw_data[row:] + codes.raw_data[:row]
    other = run(faulty, case.folder, case.folder, inputs)["logits"]
    assert relative_error(other, expected) > 10 * FLOAT16_TOLERANCE


@pytest.mark.parametrize("kind", ["gptq-act-order", "modelopt-nvfp4"])
def test_formats_that_no_plugin_takes_are_dequantised(tmp_path: Path, kind: str) -> None:
    ready = exported(tmp_path, kind)
    assert keep_packed_products(ready, REFERENCE_ROOT, tmp_path) is ready
    assert not (tmp_path / PACKED_FILE).exists()


def test_products_of_the_linear_plugin_are_packed_too(
    kept: Callable[[str], Kept], tmp_path: Path
) -> None:
    """As TensorRT 8.6 has them, whose other products are a plugin's."""
    case = kept("fp8")
    linear = exported(tmp_path, "fp8", linear=True, residual="float32")
    again = keep_packed_products(linear, REFERENCE_ROOT, tmp_path)
    assert [n.input[1:] for n in products(again)] == [n.input[1:] for n in products(case.packed)]
    assert (tmp_path / PACKED_FILE).read_bytes() == (case.folder / PACKED_FILE).read_bytes()


def test_values_that_the_type_does_not_hold_are_left_to_the_weights_own_check(
    kept: Callable[[str], Kept], tmp_path: Path
) -> None:
    ready = kept("fp8-channel").ready
    name = next(name for name in ready.weights if name.endswith("layers.0.self_attn.qkv.weight"))
    large = tuple(replace(part, scale=2.0**20) for part in ready.weights[name].parts)
    changed = {**ready.weights, name: replace(ready.weights[name], parts=large)}
    packed = keep_packed_products(replace(ready, weights=changed), REFERENCE_ROOT, tmp_path)
    assert name in packed.weights
    assert len(products(packed)) == PRODUCTS * 3 // 4 - 1


def test_weight_that_something_else_reads_stays_whole(
    kept: Callable[[str], Kept], tmp_path: Path
) -> None:
    ready = kept("fp8").ready
    model = onnx.ModelProto()
    model.CopyFrom(ready.model)
    product = next(n for n in model.graph.node if "layers.0.self_attn.qkv" in n.name)
    model.graph.node.append(helper.make_node("Identity", [product.input[1]], ["kept"], name="r"))
    packed = keep_packed_products(replace(ready, model=model), REFERENCE_ROOT, tmp_path)
    assert product.input[1] in packed.weights
    assert len(products(packed)) == PRODUCTS * 3 // 4 - 1


@pytest.mark.parametrize(("kind", "per_word"), [("fp8", 4), ("w4a16-asymmetric", 8)])
def test_codes_lie_four_and_eight_in_an_int32(
    kept: Callable[[str], Kept], kind: str, per_word: int
) -> None:
    case = kept(kind)
    node = products(case.packed)[0]
    rows, inner = whole(case, node).shape
    shapes = {i.name: (i.data_type, list(i.dims)) for i in case.packed.model.graph.initializer}
    found = [shapes[name] for name in node.input[1:]]
    integer = TensorProto.INT32
    codes = (integer, [rows, inner // per_word])
    if kind == "fp8":
        assert found == [codes, (TensorProto.FLOAT, [-(-rows // 128), inner // 128])]
    else:
        groups = inner // 64
        assert found == [codes, (integer, [rows // 2, groups]), (integer, [rows // 4, groups])]
