"""A large picture on the CPU takes bounded memory: attention goes through it in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.peak_memory import peak_bytes
from tests.tiny import TARGET
from trt_eagle3.engine.bundle.record import REFERENCE_ROOT, reference_location
from trt_eagle3.engine.runtime.session import open_session
from trt_eagle3.families.qwen3_vl.vision_graph import vision_graph
from trt_eagle3.families.qwen3_vl.vision_rows import vision_rows
from trt_eagle3.families.registry import read_target

SIDE = 64  # patches: 1024 x 1024 pixels, whose scores would take 201 MB a layer
# bytes; measured 83e6, and 178e6 for 112 x 112 patches, whose scores would take 1.9 GB
BOUND = 120e6


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_large_picture_takes_bounded_memory(backend: str, tmp_path: Path) -> None:
    spec = read_target(TARGET)
    model = tmp_path / "vision.onnx"
    model.write_bytes(vision_graph(spec, "float32", reference_location).SerializeToString())
    session = open_session(backend, model, REFERENCE_ROOT)

    def run(side: int) -> None:
        given = vision_rows(torch.tensor([[1, side, side]]), 2, 8).inputs()
        patches = torch.randn(side * side, spec.vision.patch_dim)
        assert session.run({"patches": patches, **given})["visual_embeds"].isfinite().all()

    run(8)
    taken = peak_bytes(lambda: run(SIDE))
    heads = spec.vision.num_heads
    assert 4 * heads * SIDE**4 > 1.5 * BOUND, "the scores at once would not fit"
    assert BOUND / 4 < taken < BOUND
