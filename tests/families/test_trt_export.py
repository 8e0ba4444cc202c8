"""The new towers' graphs as TensorRT reads them: opset 17, our ops as plugin nodes. No engine of
them has been built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from tests.families.internvl.random_pair import save_internvl
from tests.families.qwen2_5_vl.random_pair import save_qwen25
from trt_eagle3.engine.bundle.record import reference_location
from trt_eagle3.families.registry import read_target, tower_of
from trt_eagle3.graph.ops import DOMAIN
from trt_eagle3.graph.trt_export import trt_export


@pytest.mark.parametrize("save", [save_qwen25, save_internvl], ids=["qwen2_5_vl", "internvl"])
def test_vision_graph_is_exported_in_opset_17(save: Any, tmp_path: Path) -> None:
    save(tmp_path)
    spec = read_target(tmp_path)
    tower = tower_of(spec)
    made = trt_export(tower.graph(spec, "float16", reference_location)).model
    assert next(o.version for o in made.opset_import if o.domain == "") == 17
    for node in made.graph.node:
        if node.domain != DOMAIN:
            assert onnx.defs.get_schema(node.op_type, 17).since_version <= 17, node.op_type
    plugins = {node.op_type for node in made.graph.node if node.domain == DOMAIN}
    assert "VisionAttention" in plugins
    inputs = tower.inputs(spec.require_vision(), torch.tensor([[1, 6, 6]]))
    assert {i.name for i in made.graph.input} == {"patches", *inputs}
