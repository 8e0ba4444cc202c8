"""States of bytes as words: what a graph's ports and its list of states say then."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto

from tests.tiny import TARGET
from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.bundle.record import reference_location
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.build_graphs import build_graphs
from trt_eagle3.graph.states import read_states
from trt_eagle3.graph.trt_export import trt_export
from trt_eagle3.graph.word_states import with_word_states


def target(kv_dtype: str) -> onnx.ModelProto:
    engine = EngineConfig.model_validate({"backend": "tensorrt", "kv_dtype": kv_dtype})
    return build_graphs(read_target(TARGET), None, engine, reference_location)["target"]


def test_fp8_caches_are_four_numbers_in_an_int32() -> None:
    model = target("fp8")
    made = with_word_states(model)
    states = read_states(made)  # which compares them with the ports
    assert {(state.dtype, state.shape) for state in states} == {("int32", (2, 16))}
    assert {(state.dtype, state.shape) for state in read_states(model)} == {("uint8", (2, 64))}
    assert made.graph.node == model.graph.node


def test_attention_over_fp8_caches_says_so_to_its_plugin() -> None:
    ready = trt_export(with_word_states(target("fp8")))
    nodes = [node for node in ready.model.graph.node if node.op_type == "TreeAttention"]
    values = [
        {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}["kv_type"]
        for node in nodes
    ]
    assert values == [TensorProto.FLOAT8E4M3FN] * 8
    scales = {proto.name: proto.dims for proto in ready.model.graph.initializer}
    assert all(list(scales[node.input[9]]) == [2, 2] for node in nodes)


def test_graph_whose_states_are_of_the_compute_type_stays_as_it_is() -> None:
    model = target("compute")
    assert with_word_states(model) is model


def test_rows_that_are_no_whole_words_are_refused() -> None:
    model = target("fp8")
    for value in (*model.graph.input, *model.graph.output):
        if "cache" in value.name:
            value.type.tensor_type.shape.dim[-1].dim_value = 62
    for entry in model.metadata_props:
        entry.value = entry.value.replace("[2,64]", "[2,62]")
    with pytest.raises(
        UserError, match=r"k_cache\.0: expected rows of a multiple of 4 FP8 numbers, got 62"
    ):
        with_word_states(model)
