"""The lowering that TensorRT's plugins are measured against computes what our ops compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto

from benchmarks.lowering import lowered
from tests.graph.test_trt_export import graphs, inputs_of, run, written
from tests.reference.compare import FLOAT32_TOLERANCE
from trt_eagle3.engine.bundle.record import REFERENCE_ROOT
from trt_eagle3.graph.ops import DOMAIN
from trt_eagle3.graph.trt_export import float32_nodes, trt_export
from trt_eagle3.parity.metrics import relative_error


@pytest.mark.parametrize("graph", ["target", "draft"])
def test_lowered_graph_computes_what_ours_does(graph: str, tmp_path: Path) -> None:
    model, inputs = graphs("float32")[graph], inputs_of(graph, torch.float32)
    expected = run(model, tmp_path / "plain", REFERENCE_ROOT, inputs)
    ready = trt_export(model)
    written(ready, tmp_path)
    standard = lowered(ready.model, TensorProto.FLOAT)
    assert not any(node.domain == DOMAIN for node in standard.graph.node)
    (tmp_path / "lowered.onnx").write_bytes(standard.SerializeToString())
    session = ort.InferenceSession(tmp_path / "lowered.onnx", providers=["CPUExecutionProvider"])
    found = session.run(
        None, {name: np.ascontiguousarray(value.numpy()) for name, value in inputs.items()}
    )
    for output, value in zip(session.get_outputs(), found, strict=True):
        # page 0 takes the padding's rows in any order, and padding's outputs mean nothing
        real = (
            value[16:]
            if "cache" in output.name
            else value
            if output.name == "logits"
            else value[:, :4]
        )
        wanted = expected[output.name]
        wanted = wanted[16:] if "cache" in output.name else wanted[:, : real.shape[1]]
        assert relative_error(torch.from_numpy(real), wanted) < FLOAT32_TOLERANCE, output.name


def test_what_computes_in_float32_is_known_by_name() -> None:
    standard = lowered(trt_export(graphs("float16")["target"]).model, TensorProto.FLOAT16)
    names = [node.name for node in standard.graph.node]
    assert all(names)
    assert len(set(names)) == len(names)
    wide = {name.rpartition("/")[2] for name in float32_nodes(standard)}
    assert {"ReduceMean", "Sqrt", "Cos", "Sin"} <= wide
    assert not {"Gemm", "MatMul", "Softmax"} & wide
