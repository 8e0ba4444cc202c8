"""A random Qwen3.5 by the torch session on CUDA against the same on the CPU, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.hybrid import ROPE, save_qwen3_5_text
from tests.reference.checkpoint import file_name
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.target import target_graph
from trt_eagle3.parity.metrics import relative_error

pytestmark = pytest.mark.gpu

PAGE_SIZE = 16
TOLERANCES = {"float32": 2e-5, "bfloat16": 7e-2}
"""Of relative errors of whole tensors; seen on an H200: 1.3e-6 and 2.7e-2."""
PARENTS = {
    "one row": [-1],
    "tree": [-1, 0, 0, 1, 1, 2, 3, 3, 5],
    "prompt": list(range(-1, 149)),
}
GEOMETRY = {
    "hidden_size": 64,
    "head_dim": 64,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.25, "mrope_section": [4, 2, 2]},
}


def run(spec: TargetCheckpoint, dtype: str, device: str, parents: list[int]) -> dict[str, Tensor]:
    """Outputs of a forward of rows below ``parents``, from random recurrent states."""
    graph = target_graph(spec, (0, 1, 2), False, dtype, PAGE_SIZE, file_name)
    file = spec.path / "model.onnx"
    file.write_bytes(graph.SerializeToString())
    session = TorchSession(file, spec.path, device=device)
    generator, count = torch.Generator().manual_seed(1), len(parents)
    mask = torch.zeros(1, count, count, dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[0, row] = mask[0, parent]
        mask[0, row, row] = True
    one = torch.ones(1, dtype=torch.int32)
    embeds = torch.randn(1, count, spec.hidden_size, generator=generator)
    inputs = {
        "inputs_embeds": embeds.to(dtype_named(dtype).torch),
        "position_ids": (mask.sum(-1).int() + 99).expand(3, 1, count).contiguous(),
        "past_lengths": one - 1,
        "query_lengths": one * count,
        "page_table": torch.arange(1, 1 + -(-count // PAGE_SIZE), dtype=torch.int32)[None],
        "tree_mask": mask,
        "logit_rows": torch.arange(count, dtype=torch.int32)[None],
        "state_reads": one - 1,
        "state_writes": one,
        "certain": one,
    }
    for state in session.states:
        paged = state.kind == "paged"
        size = PAGE_SIZE * (2 + count // PAGE_SIZE) if paged else 2
        values = torch.randn(size, *state.shape, generator=generator)
        inputs[state.name] = (values * (0.0 if paged else 0.3)).to(dtype_named(state.dtype).torch)
    return {name: value.double().cpu() for name, value in session.run(inputs).items()}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", PARENTS)
def test_cuda_equals_the_cpu(name: str, dtype: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    save_qwen3_5_text(tmp_path, **GEOMETRY)
    spec = read_target(tmp_path)
    expected = run(spec, "float32", "cpu", PARENTS[name])
    found = run(spec, dtype, "cuda", PARENTS[name])
    for tensor in (name for name in expected if "cache" not in name):
        assert relative_error(found[tensor], expected[tensor]) < TOLERANCES[dtype], tensor
