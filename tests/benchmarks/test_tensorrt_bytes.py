"""Bytes of weights that a step of a TensorRT engine reads, for the floor of its benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tensorrt import _weight_bytes, _with_drawn
from tests.moe import save_qwen3_moe
from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.bundle.record import reference_location
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.build_graphs import build_graphs
from trt_eagle3.graph.trt_export import trt_export

HIDDEN, WIDTH, EXPERTS, LAYERS = 256, 128, 8, 3


@pytest.mark.parametrize(("weights", "bits"), [("bfloat16", 16), ("fp8", 8), ("int4", 4)])
def test_step_reads_the_experts_of_its_tokens(weights: str, bits: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_experts": EXPERTS}
    save_qwen3_moe(tmp_path / "target", **sizes, num_experts_per_tok=2, head_dim=32)
    spec = read_target(tmp_path / "target")
    engine = EngineConfig.model_validate({"backend": "tensorrt"})
    model = build_graphs(spec, None, engine, reference_location)["target"]
    ready = _with_drawn(trt_export(model, linear=True), tmp_path, weights)
    one, all_of_them = (_weight_bytes(ready, tmp_path, spec, n) for n in (1, 10_000))
    unread = 3 / 4 * LAYERS * EXPERTS * 3 * HIDDEN * WIDTH * bits / 8
    assert unread <= all_of_them - one < 1.2 * unread  # scales too
