"""Quantised experts by our plugins: which, and that their bytes are the values that every other
backend has.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import external_data_helper, numpy_helper
from torch import Tensor

from tests.families.text_pairs import quantise
from tests.graph.plugin_schemas import plugin_schemas
from tests.graph.test_trt_export import written
from tests.moe import save_qwen3_moe, with_layout
from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.bundle.record import REFERENCE_ROOT, reference_location
from trt_eagle3.engine.runtime.weights import materialise
from trt_eagle3.engine.trt.packed_file import PACKED_FILE, packed_counts
from trt_eagle3.engine.trt.packed_products import keep_packed_products
from trt_eagle3.engine.trt.packed_weights import keep_packed
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.build_graphs import build_graphs
from trt_eagle3.graph.ops import EVERY_OP
from trt_eagle3.graph.trt_export import TrtExport, trt_export
from trt_eagle3.parity.metrics import relative_error

KINDS = {
    "fp8": "FusedMoeFp8",
    "fp8-channel": "FusedMoeFp8",
    "w4a16": "FusedMoeInt4",
    "w4a16-asymmetric": "FusedMoeInt4",
}
LAYERS, EXPERTS, HIDDEN, WIDTH = 2, 4, 256, 128
GEOMETRY = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": WIDTH,
    "num_experts": EXPERTS,
    "num_hidden_layers": LAYERS,
    "head_dim": 32,
}
# one rounding of the weights, the inner values and the sum to float16
TOLERANCE = 3e-3


def exported(folder: Path, kind: str, *, linear: bool = True, **changes: int) -> TrtExport:
    """A mixture whose experts are stored in format ``kind``, as it goes to TensorRT."""
    target = folder / "checkpoint"
    model = save_qwen3_moe(target, **GEOMETRY | changes)
    with_layout(target, model, "single")
    quantise(target, kind)
    engine = EngineConfig.model_validate({"backend": "tensorrt", "residual": "float32"})
    graphs = build_graphs(read_target(target), None, engine, reference_location)
    return trt_export(graphs["target"], linear=linear)


def mixtures(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [n for n in model.graph.node if n.op_type.startswith("FusedMoe")]


def constants(packed: TrtExport, folder: Path) -> dict[str, Tensor]:
    """The tensors in the packed file."""
    found = {}
    for proto in packed.model.graph.initializer:
        if any(e.key == "location" and e.value == PACKED_FILE for e in proto.external_data):
            read = onnx.TensorProto()
            read.CopyFrom(proto)
            external_data_helper.load_external_data_for_tensor(read, str(folder))
            found[proto.name] = torch.from_numpy(np.array(numpy_helper.to_array(read)))
    return found


def computed(node: onnx.NodeProto, x: Tensor, logits: Tensor, stored: list[Tensor]) -> Tensor:
    op = EVERY_OP[node.op_type]
    own = {a.name: a.i for a in node.attribute if a.name in set().union(*op.attributes.values())}
    result: Tensor = op.torch_function(x, logits, *stored, **own)
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_packed_experts_compute_what_the_dequantised_ones_do(kind: str, tmp_path: Path) -> None:
    ready = exported(tmp_path, kind)
    packed = keep_packed_products(ready, REFERENCE_ROOT, tmp_path)
    stored = constants(packed, tmp_path)
    torch.manual_seed(0)
    x, logits = torch.randn(7, HIDDEN).half(), torch.randn(7, EXPERTS).half()
    before, after = mixtures(ready.model), mixtures(packed.model)
    assert len(after) == LAYERS
    for dense, node in zip(before, after, strict=True):
        assert node.op_type == KINDS[kind]
        assert (node.input[:2], node.output) == (dense.input[:2], dense.output)
        exprs = [ready.weights[name] for name in dense.input[2:]]
        values = [materialise(e, REFERENCE_ROOT, e.dtype) for e in exprs]
        own = [stored[name] for name in node.input[2:]]
        found, expected = computed(node, x, logits, own), computed(dense, x, logits, values)
        assert relative_error(found, expected) < TOLERANCE
        own[0] = own[0].roll(1, 0)  # another expert's gate and up
        assert relative_error(computed(node, x, logits, own), expected) > 10 * TOLERANCE
    gone = {name for node in before for name in node.input[2:]}
    assert not gone & packed.weights.keys()
    products = len([n for n in packed.model.graph.node if n.op_type.startswith("Linear")])
    (count,) = packed_counts(packed.model).values()
    assert 2 * LAYERS < count <= 2 * LAYERS + products


@pytest.mark.parametrize("kind", ["fp8-channel", "w4a16"])
def test_experts_stay_packed_beside_products_of_a_builder(kind: str, tmp_path: Path) -> None:
    """TensorRT for RTX multiplies quantised weights itself, but has no such experts."""
    ready = exported(tmp_path, kind, linear=False)
    packed = keep_packed(ready, REFERENCE_ROOT, tmp_path, fp8=True)
    assert {node.op_type for node in mixtures(packed.model)} == {KINDS[kind]}
    ops = [node.op_type for node in packed.model.graph.node]
    assert ops.count("DequantizeLinear") == 2 * LAYERS  # of qkv and o


def test_graph_with_packed_experts_is_valid(tmp_path: Path) -> None:
    packed = keep_packed_products(exported(tmp_path, "w4a16-asymmetric"), REFERENCE_ROOT, tmp_path)
    with plugin_schemas():
        file = written(packed, tmp_path)
        onnx.checker.check_model(str(file), check_custom_domain=True)


@pytest.mark.parametrize(
    ("kind", "changes"), [("int8", {}), ("fp8-channel", {"moe_intermediate_size": 64})]
)
def test_experts_that_no_kernel_multiplies_are_dequantised(
    kind: str, changes: dict[str, int], tmp_path: Path
) -> None:
    packed = keep_packed_products(exported(tmp_path, kind, **changes), REFERENCE_ROOT, tmp_path)
    assert {node.op_type for node in mixtures(packed.model)} == {"FusedMoe"}
