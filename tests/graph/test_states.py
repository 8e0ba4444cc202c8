"""The states of a graph: listed in its metadata, read back, refused where they contradict it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto

from trt_eagle3.errors import UserError
from trt_eagle3.graph.builder import GraphBuilder
from trt_eagle3.graph.states import decode_states, encode_states, read_states
from trt_eagle3.graph.trt_export import trt_export
from trt_eagle3.spec import StateSpec

KEYS = StateSpec("k_cache.3", "paged", (2, 8), "float16")
RECURRENT = StateSpec("recurrent.3", "delta", (4, 8, 8), "float32")


def model(*states: StateSpec) -> onnx.ModelProto:
    b = GraphBuilder("layers", "float32", str)
    for state in states:
        b.update_state(state, b.op("Identity", b.state(state)))
    b.output(b.op("Identity", b.input("x", b.dtype, ("n", 2))), "y", ("n", 2))
    return b.build()


def test_states_of_both_kinds_are_inputs_outputs_and_metadata(tmp_path: Path) -> None:
    made = model(KEYS, RECURRENT)
    file = tmp_path / "model.onnx"
    file.write_bytes(made.SerializeToString())
    assert read_states(made) == read_states(file) == (KEYS, RECURRENT)
    assert [value.name for value in made.graph.output] == ["k_cache_out.3", "recurrent_out.3", "y"]
    dims = [d.dim_param or d.dim_value for d in made.graph.input[1].type.tensor_type.shape.dim]
    assert dims == ["sequences", 4, 8, 8]
    assert made.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT16


def test_graph_without_states_lists_none() -> None:
    assert read_states(model()) == ()
    assert not model().metadata_props


def test_exported_graph_keeps_its_states() -> None:
    assert read_states(trt_export(model(KEYS)).model) == (KEYS,)


def test_states_in_json_come_back() -> None:
    text = json.dumps(encode_states([KEYS, RECURRENT]))
    assert decode_states(json.loads(text), "config.json") == (KEYS, RECURRENT)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"shape": [2, 9]},
        {"shape": [2, -8]},
        {"shape": [True, 8]},
        {"shape": 8},
        {"kind": "delta"},
        {"kind": "none"},
        {"kind": []},
        {"dtype": "float32"},
        {"dtype": "nothing"},
        {"more": 1},
        {"name": 3},
    ],
    ids=str,
)
def test_list_that_contradicts_the_graph_is_refused_in_one_line(change: dict[str, Any]) -> None:
    made = model(KEYS)
    made.metadata_props[0].value = json.dumps([dataclasses.asdict(KEYS) | change])
    with pytest.raises(UserError, match=r"^layers: the list of its layers' states is damaged") as e:
        read_states(made)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("text", ["", "{", "3", "[3]", "null", "[[]]", "[" * 10**5], ids=len)
def test_list_that_is_no_list_of_states_is_refused(text: str) -> None:
    made = model(KEYS)
    made.metadata_props[0].value = text
    with pytest.raises(UserError, match="states is damaged: unreadable"):
        read_states(made)


def test_state_listed_twice_is_refused() -> None:
    made = model(KEYS)
    made.metadata_props[0].value = json.dumps(encode_states([KEYS, KEYS]))
    with pytest.raises(UserError, match="listed twice"):
        read_states(made)


def test_unreadable_graph_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\xff" * 9)
    for file in (tmp_path / "model.onnx", tmp_path / "none.onnx"):
        with pytest.raises(UserError, match="cannot read it"):
            read_states(file)
