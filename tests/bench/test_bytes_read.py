"""The floors of steps: what a step must read."""

from __future__ import annotations

from pathlib import Path

import pytest

from trt_eagle3.bench import synthetic
from trt_eagle3.bench.gpu import target_bytes_read
from trt_eagle3.bench.synthetic import write_target
from trt_eagle3.families.registry import read_target

SMALL = (256, 5, 2, 1, 256, False, 4, 256, 512, (0, 1, 2))


def test_step_of_a_mixture_reads_the_experts_that_its_tokens_go_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic, "SIZES", {"30b-a3b": SMALL})
    write_target(tmp_path, "30b-a3b")
    spec = read_target(tmp_path)
    experts = sum(ref.num_bytes for name, ref in spec.tensors.items() if ".experts." in name)
    assert experts == 5 * 128 * 3 * 768 * 256 * 2
    rest = target_bytes_read(spec, "bfloat16", 0)
    for tokens, touched in ((1, 8.0), (6, 41.1)):
        wanted = rest + experts * touched / 128
        assert target_bytes_read(spec, "bfloat16", tokens) == pytest.approx(wanted, 1e-3)
