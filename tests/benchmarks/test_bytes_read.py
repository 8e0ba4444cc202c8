"""The floors of steps: what a step must read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import synthetic
from benchmarks.drawn_packed import PACKED_KINDS, draw_packed
from benchmarks.gpu import target_bytes_read
from benchmarks.synthetic import write_target
from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.bundle.record import reference_location
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.build_graphs import build_graphs
from trt_eagle3.graph.weights import external_weights

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


@pytest.mark.parametrize("size", ["30b-a3b", "8b"])
def test_what_is_drawn_has_the_bytes_that_are_counted(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every kind, experts too: all of them, as many tokens read."""
    monkeypatch.setattr(synthetic, "SIZES", {size: SMALL})
    write_target(tmp_path, size)
    spec = read_target(tmp_path)
    engine = EngineConfig(backend="torch", device="cpu", dtype="bfloat16", page_size=16)
    weights = external_weights(build_graphs(spec, None, engine, reference_location)["target"])
    packed = {}
    for kind in PACKED_KINDS:
        num_bytes = 0
        for expr in weights.values():
            drawn = draw_packed(expr, kind, torch.device("meta"))
            num_bytes += expr.num_bytes if drawn is None else sum(t.nbytes for t in parts(drawn))
        packed[kind] = num_bytes
        # scales of FP8 and INT8 are not counted
        assert num_bytes == pytest.approx(target_bytes_read(spec, kind, 1 << 20), 0.02), kind
    assert packed["int4"] < packed["fp8"] < packed["bfloat16"]


def parts(drawn: Any) -> Iterator[Tensor]:
    for field in fields(drawn):
        value = getattr(drawn, field.name)
        if isinstance(value, Tensor):
            yield value
