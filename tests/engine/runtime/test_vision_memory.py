"""A large picture on the CPU takes bounded memory: attention goes through it in pieces."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import TARGET
from trt_eagle3.engine.bundle.record import REFERENCE_ROOT, reference_location
from trt_eagle3.families.qwen3_vl.vision_graph import vision_graph
from trt_eagle3.families.registry import read_target

SIDE = 64  # patches: 1024 x 1024 pixels, whose scores would take 201 MB a layer
# bytes; measured 83e6, and 178e6 for 112 x 112 patches, whose scores would take 1.9 GB
BOUND = 120e6

_CHILD = """
import resource, sys
from pathlib import Path
import torch
from trt_eagle3.engine.runtime.session import open_session
from trt_eagle3.families.qwen3_vl.vision_rows import vision_rows

torch.set_num_threads(1)
backend, model, root = sys.argv[1:4]
side, patch_dim = map(int, sys.argv[4:6])
session = open_session(backend, Path(model), Path(root))

def run(rows):
    given = vision_rows(torch.tensor([[1, rows, rows]]), 2, 8).inputs()
    out = session.run({"patches": torch.randn(rows * rows, patch_dim), **given})
    assert torch.isfinite(out["visual_embeds"]).all()

run(8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(side)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_large_picture_takes_bounded_memory(backend: str, tmp_path: Path) -> None:
    spec = read_target(TARGET)
    model = tmp_path / "vision.onnx"
    model.write_bytes(vision_graph(spec, "float32", reference_location).SerializeToString())
    arguments = [backend, str(model), str(REFERENCE_ROOT), str(SIDE), str(spec.vision.patch_dim)]
    command = [sys.executable, "-c", _CHILD, *arguments]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    heads = spec.vision.num_heads
    assert 4 * heads * SIDE**4 > 1.5 * BOUND, "the scores at once would not fit"
    assert int(found.stdout) < BOUND
