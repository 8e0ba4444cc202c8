"""An op's reference lowering, run by ONNX Runtime as a graph of one node."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from onnx import TensorProto
from torch import Tensor

from trt_eagle3.engine.onnxruntime.session import OnnxRuntimeSession
from trt_eagle3.graph.builder import GraphBuilder
from trt_eagle3.graph.ops import OPS

GQA = [(1, 1), (2, 1), (4, 2), (5, 1), (7, 1)]
FAR_POSITION = 200_000
SEEDS = st.integers(0, 2**31)
Attributes = tuple[tuple[str, Any], ...]
_RANKS = {
    **dict.fromkeys(("k_cache_out", "v_cache_out", "conv_state_out", "conv_rows", "delta_rows"), 3),
    "delta_state_out": 4,
}
_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.int32: TensorProto.INT32,
    torch.bool: TensorProto.BOOL,
    torch.uint8: TensorProto.UINT8,
}


@cache
def session(
    op_type: str, overload: str, types: tuple[tuple[int, torch.dtype], ...], attributes: Attributes
) -> Any:
    """A graph of one node; ``types``: rank and type of each input."""
    b = GraphBuilder(op_type, "float32", str)
    op = OPS[op_type]
    inputs = [
        b.input(name, _TYPES[dtype], [f"{name}_{i}" for i in range(rank)])
        for name, (rank, dtype) in zip(op.inputs[overload], types, strict=True)
    ]
    names = op.outputs[overload]
    types_out = op.output_types([value.dtype for value in inputs], TensorProto.FLOAT)
    outputs = b.own_op(
        op_type, *inputs, names=names, overload=overload, dtypes=types_out, **dict(attributes)
    )
    for value, name in zip(outputs, names, strict=True):
        rank = _RANKS.get(name, 2)
        b.output(value, name, [f"{name}_out_{i}" for i in range(rank)])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.onnx"
        path.write_bytes(b.build().SerializeToString())
        return OnnxRuntimeSession(path, Path(directory))


def run_op(
    op_type: str, overload: str, inputs: dict[str, Tensor], **attributes: Any
) -> dict[str, Tensor]:
    types = tuple((inputs[name].ndim, inputs[name].dtype) for name in OPS[op_type].inputs[overload])
    return session(op_type, overload, types, tuple(sorted(attributes.items()))).run(inputs)
