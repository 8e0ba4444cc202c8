"""Vision graphs of DeepSeek-VL by the torch session on CUDA against float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families.deepseek_vl.random_pair import FAMILIES, save_deepseek
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.bundle.record import REFERENCE_ROOT, reference_location
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.families.registry import read_target, tower_of
from trt_eagle3.parity.metrics import relative_error

pytestmark = pytest.mark.gpu

TOLERANCES = {"float32": 2e-5, "bfloat16": 7e-2}
SECTIONS: dict[str, Any] = {
    "siglip": {"hidden_size": 128, "image_size": 96, "patch_size": 8},
    "sam": {"hidden_size": 192, "image_size": 160, "patch_size": 8, "window_size": 7},
}
"""Heads of 64, which have a kernel on tensor cores; windows of 7 do not divide 20 patches."""


def embeds(spec: TargetCheckpoint, dtype: str, device: str, times: int = 1) -> Tensor:
    """Visual embeddings of two images of noise, of the last of ``times`` runs."""
    vision, tower = spec.require_vision(), tower_of(spec)
    file = spec.path / f"{dtype}.onnx"
    file.write_bytes(tower.graph(spec, dtype, reference_location).SerializeToString())
    session = TorchSession(file, REFERENCE_ROOT, device=device)
    grids = torch.tensor([[1, 12, 12]] * 2)
    noise = torch.randn(288, vision.patch_dim, generator=torch.Generator().manual_seed(1))
    inputs = {"patches": noise.to(dtype_named(dtype).torch), **tower.inputs(vision, grids)}
    outputs = [session.run(inputs)["visual_embeds"].double().cpu() for _ in range(times)]
    return outputs[-1]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_equals_the_cpu(family: str, dtype: str, tmp_path: Path) -> None:
    """Of six runs, the last are replays of a CUDA graph."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    save_deepseek(tmp_path, family, **SECTIONS)
    spec = read_target(tmp_path)
    expected = embeds(spec, "float32", "cpu")
    assert relative_error(embeds(spec, dtype, "cuda", 6), expected) < TOLERANCES[dtype]
