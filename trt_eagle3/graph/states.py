"""The states of a graph's layers, listed in its metadata. No code depends on their names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import onnx

from trt_eagle3.dtype import DTYPES, dtype_named
from trt_eagle3.errors import UserError, clip, quote
from trt_eagle3.spec import StateKind, StateSpec

__all__ = [
    "LEADING_DIM",
    "copy_states",
    "decode_states",
    "encode_states",
    "read_states",
    "replace_states",
    "write_states",
]

LEADING_DIM: Mapping[StateKind, str] = {
    "paged": "slots",
    "window": "sequences",
    "delta": "sequences",
}
"""Name of the first dimension of a state's input and output."""

_STATES_KEY = "trt_eagle3.states"  # of metadata_props: a JSON list, in the order of the layers
_REBUILD = "Rebuild: trt-eagle3 build --config <its config>"
_DTYPES = tuple(dtype.name for dtype in DTYPES)


def write_states(model: onnx.ModelProto, states: Sequence[StateSpec]) -> None:
    """List ``states`` in the metadata of ``model``. A graph without states gets no entry."""
    if states:
        text = json.dumps(encode_states(states), separators=(",", ":"))
        model.metadata_props.add(key=_STATES_KEY, value=text)


def replace_states(model: onnx.ModelProto, states: Sequence[StateSpec]) -> None:
    """List ``states`` in place of those that ``model`` lists."""
    kept = [entry for entry in model.metadata_props if entry.key != _STATES_KEY]
    model.ClearField("metadata_props")
    model.metadata_props.extend(kept)
    write_states(model, states)


def copy_states(source: onnx.ModelProto, model: onnx.ModelProto) -> None:
    """Copy the list of states from ``source`` to ``model``, which was made from it."""
    for entry in source.metadata_props:
        if entry.key == _STATES_KEY:
            model.metadata_props.add(key=entry.key, value=entry.value)


def read_states(model: onnx.ModelProto | Path) -> tuple[StateSpec, ...]:
    """Read the states of a graph, in the order of its layers; empty if it has none.

    Raises:
        UserError: the file is unreadable, or the metadata contradict the graph's inputs and
            outputs.
    """
    proto, where = (
        (_load(model), str(model)) if isinstance(model, Path) else (model, model.graph.name)
    )
    text = next((e.value for e in proto.metadata_props if e.key == _STATES_KEY), "[]")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(where, f"unreadable ({type(error).__name__})") from error
    states = decode_states(raw, where)
    _check_ports(proto, states, where)
    return states


def encode_states(states: Sequence[StateSpec]) -> list[dict[str, Any]]:
    """Convert ``states`` to JSON values."""
    return [asdict(state) for state in states]


def decode_states(raw: Any, where: str) -> tuple[StateSpec, ...]:
    """Read the states that ``encode_states`` wrote; ``where``: their place, for messages.

    Raises:
        UserError: ``raw`` is anything else.
    """
    try:
        return tuple(_state(state) for state in raw)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(where, f"unreadable ({type(error).__name__})") from error


def _load(file: Path) -> onnx.ModelProto:
    try:
        return onnx.load(file, load_external_data=False)
    except Exception as error:  # protobuf's own errors have no base class but Exception
        raise UserError(f"{file}: cannot read it: {clip(error)}. {_REBUILD}") from error


def _state(raw: Mapping[str, Any]) -> StateSpec:
    state = StateSpec(raw["name"], raw["kind"], tuple(raw["shape"]), raw["dtype"])
    if not isinstance(state.name, str) or raw.keys() != asdict(state).keys():
        raise ValueError("fields")
    if state.kind not in get_args(StateKind) or state.dtype not in _DTYPES:
        raise ValueError("kind or dtype")
    if not all(type(size) is int and size > 0 for size in state.shape):
        raise ValueError("shape")
    return state


def _check_ports(proto: onnx.ModelProto, states: Sequence[StateSpec], where: str) -> None:
    """Check that each state is an input and output of the graph, of its own type and shape."""
    inputs, outputs = (
        {value.name: value.type.tensor_type for value in values}
        for values in (proto.graph.input, proto.graph.output)
    )
    if len({state.name for state in states}) != len(states):
        raise _damaged(where, "a state is listed twice")
    for state in states:
        expected = (dtype_named(state.dtype).onnx, [LEADING_DIM[state.kind], *state.shape])
        for name, ports in ((state.name, inputs), (state.output_name, outputs)):
            found = _port(ports[name]) if name in ports else None
            if found != expected:
                raise _damaged(where, f"{quote(name)}: expected {expected}, got {found}")


def _port(port: onnx.TypeProto.Tensor) -> tuple[int, list[int | str]]:
    return port.elem_type, [d.dim_param or d.dim_value for d in port.shape.dim]


def _damaged(where: str, what: str) -> UserError:
    return UserError(f"{where}: the list of its layers' states is damaged: {what}. {_REBUILD}")
