"""Bundles whose engines keep weights quantised: what a build asks of TensorRT, and what it leaves
to be built.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import onnx
import pytest
from pydantic import ValidationError

from tests.engine.conftest import Install
from tests.engine.trt.test_session import ENGINE
from tests.tiny import tiny_config
from trt_eagle3.config import BuildConfig
from trt_eagle3.engine.builder.weight_quantiser import made_location
from trt_eagle3.engine.trt.folder import EngineFolder
from trt_eagle3.engine.trt.packed_file import PACKED_FILE, packed_counts
from trt_eagle3.graph.trt_export import WEIGHTS_FILE
from trt_eagle3.pipeline import build


def quantised(weights: str, **tensorrt: str) -> BuildConfig:
    """The tiny target, quantised at build."""
    engine = ENGINE | {"weights": weights, "tensorrt": tensorrt}
    return tiny_config(engine=engine, draft=None)


@pytest.mark.parametrize(
    ("version", "weights", "plugin"),
    [
        ("8.6.0", "fp8", "LinearFp8"),
        ("10.14.1", "fp8", "LinearFp8"),
        ("11.0.0", "int4", "LinearInt4"),
        ("11.0.0", "int8", "LinearInt8"),
    ],
)
def test_quantised_weights_stay_so_behind_plugins(
    install: Install, tmp_path: Path, version: str, weights: str, plugin: str
) -> None:
    trt = install(version)
    bundle = build(quantised(weights), output=tmp_path).path
    graphs = map(onnx.load_from_string, trt.seen.graphs)
    target = next(graph for graph in graphs if graph.graph.name == "target")
    ops = Counter(node.op_type for node in target.graph.node)
    assert ops[plugin] == 8 * 3  # of down K is no multiple of 128
    assert ops["DequantizeLinear"] == 0
    assert {o.version for o in target.opset_import if not o.domain} == {17}
    inspection = json.loads((bundle / "target" / "inspection.json").read_text())
    assert inspection["packed_weights"] == {weights: 8 * 3}
    assert (bundle / made_location(weights)).is_file()  # what ``validate`` reads


def test_quantised_weights_that_no_engine_would_hold_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"hold none quantised .*linear: tensorrt"):
        quantised("fp8", linear="tensorrt")


@pytest.mark.usefixtures("no_tensorrt")
def test_graphs_left_to_trtexec_have_packed_weights_beside_them(tmp_path: Path) -> None:
    folder = build(quantised("int4"), output=tmp_path).path / "target" / "onnx"
    model = onnx.load(folder / "model.onnx")  # the weights' files too
    assert packed_counts(model) == {"int4": 8 * 3}
    assert (folder / PACKED_FILE).stat().st_size < (folder / WEIGHTS_FILE).stat().st_size


@pytest.mark.parametrize("version", ["8.6.0", "11.0.0"])
def test_fp8_keys_and_values_are_words_in_engines_and_their_profiles(
    install: Install, tmp_path: Path, version: str
) -> None:
    trt = install(version)
    bundle = build(tiny_config(engine=ENGINE | {"kv_dtype": "fp8"}), output=tmp_path).path
    folders = {name: EngineFolder(bundle / name).states for name in ("target", "draft")}
    assert {(s.dtype, s.shape) for s in folders["target"]} == {("int32", (2, 16))}
    assert {(s.dtype, s.shape) for s in folders["draft"]} == {("float16", (2, 64))}
    graphs = {g.graph.name: g for g in map(onnx.load_from_string, trt.seen.graphs)}
    ports = {value.name: value for value in graphs["target"].graph.input}
    assert ports["k_cache.0"].type.tensor_type.elem_type == onnx.TensorProto.INT32
    inspection = json.loads((bundle / "target" / "inspection.json").read_text())
    for shapes in inspection["profiles"].values():
        assert [shape[1:] for shape in shapes["k_cache.0"]] == [[2, 16]] * 3
