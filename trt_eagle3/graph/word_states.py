"""Convert states of bytes to int32 words, for plugin runtimes without a type for FP8 caches.

TensorRT 8.6 has no such type. A state uint8 [leading, .., D] becomes int32 [leading, .., D / 4] of
the same memory. Only our plugin may read such caches (``plugins/tensorrt/tree_attention.cpp``).
"""

from __future__ import annotations

import dataclasses

import onnx
from onnx import TensorProto

from trt_eagle3.errors import UserError
from trt_eagle3.graph.states import read_states, replace_states
from trt_eagle3.spec import StateSpec

__all__ = ["with_word_states"]

_BYTES = 4  # per word


def with_word_states(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert the byte states of ``model`` to words; return it unchanged if it has none.

    Raises:
        UserError: rows of a state are not a whole number of words.
    """
    states = read_states(model)
    wide = {state.name: _words(state) for state in states if state.dtype == "uint8"}
    if not wide:
        return model
    made = onnx.ModelProto()
    made.CopyFrom(model)
    ports = {state.name: state for state in wide.values()}
    ports |= {state.output_name: state for state in wide.values()}
    for value in (*made.graph.input, *made.graph.output):
        if value.name in ports:
            tensor = value.type.tensor_type
            tensor.elem_type = TensorProto.INT32
            tensor.shape.dim[-1].dim_value = ports[value.name].shape[-1]
    replace_states(made, [wide.get(state.name, state) for state in states])
    return made


def _words(state: StateSpec) -> StateSpec:
    if state.shape[-1] % _BYTES:
        raise UserError(
            f"{state.name}: expected rows of a multiple of {_BYTES} FP8 numbers, got "
            f"{state.shape[-1]}. Leave engine.kv_dtype out."
        )
    shape = (*state.shape[:-1], state.shape[-1] // _BYTES)
    return dataclasses.replace(state, shape=shape, dtype="int32")
