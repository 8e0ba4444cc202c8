"""The torch session on a CUDA device holds every check, batches with captured graphs among them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import trt_eagle3
from tests.tiny import build_tiny

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bundles_on_cuda_pass_validation(dtype: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    engine = {"backend": "torch", "device": "cuda", "dtype": dtype}
    report = trt_eagle3.validate(build_tiny(tmp_path, engine=engine, limits={"max_batch_size": 4}))
    report.check()
    others = {check.name: check.status for check in report.checks if check.status != "passed"}
    nothing_there = {"weights.values", "weights.made", "kv.rows", "kv.attention"}
    nothing_there |= {"draft.context", "draft.scores", "draft.tokens", "draft.confidence"}  # blocks
    assert others == dict.fromkeys(nothing_there, "not_applicable")
