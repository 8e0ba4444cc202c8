"""Geometries of linear attention: what their checkpoints are, and a benchmark of a small one, on
the CPU's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import cpu, gpu, random_pair
from benchmarks.drawn_packed import draw_packed
from benchmarks.prefill import prompt_operations
from benchmarks.synthetic import write_target
from benchmarks.synthetic_hybrid import HYBRID_SIZES
from trt_eagle3.engine.bundle.record import reference_location
from trt_eagle3.engine.runtime.memory import state_bytes
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.target import target_graph
from trt_eagle3.graph.weights import external_weights

BILLIONS = {
    "qwen3.5-0.8b": 0.75,
    "qwen3.5-9b": 8.95,
    "qwen3.5-27b": 26.9,
    "qwen3-next-80b": 79.7,
}


@pytest.mark.parametrize("size", BILLIONS)
def test_published_geometry_has_its_parameters_and_states(size: str, tmp_path: Path) -> None:
    write_target(tmp_path, size)
    spec, s = read_target(tmp_path), HYBRID_SIZES[size]
    placed = {(ref.file, ref.offset): ref.num_bytes for ref in spec.tensors.values()}
    count = sum(placed.values()) / 2  # a tied head counts once
    assert count / 1e9 == pytest.approx(BILLIONS[size], 0.01)
    assert len(spec.recurrent_layers) == s.layers * 3 // 4
    per_layer = s.value_heads * 128 * 128 * 4 + 3 * (2 * s.key_heads + s.value_heads) * 128 * 2
    assert state_bytes(spec, "bfloat16") == per_layer * s.layers * 3 // 4


def test_fused_projections_are_drawn_in_fp8(tmp_path: Path) -> None:
    write_target(tmp_path, "qwen3-next-tiny")
    graph = target_graph(read_target(tmp_path), (), False, "bfloat16", 16, reference_location)
    drawn = {
        name: draw_packed(expr, "fp8", torch.device("cpu"))
        for name, expr in external_weights(graph).items()
        if "layers.0.linear_attn." in name
    }
    assert [name for name, weight in drawn.items() if weight is not None] == [
        "layers.0.linear_attn.qkvz.weight",
        next(name for name in drawn if name.endswith("out_proj.weight")),
    ]


def test_benchmark_of_a_small_size_prints_steps_and_cycles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def median_ms(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)

    for module in (gpu, random_pair):
        monkeypatch.setattr(module, "_DEVICE", "cpu")
    monkeypatch.setattr(gpu, "_REPEATS", 2)
    monkeypatch.setattr(gpu, "median_ms", median_ms)
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda: 1e10)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no GPU")
    done = CliRunner().invoke(gpu.main, ["--size", "qwen3.5-tiny", "--context", "40"])
    assert done.exception is None, done.output
    rows = [line.split("│")[1].strip() for line in done.output.splitlines() if line[0] == "│"]
    assert [name for name in rows if name.startswith("target")] == [
        f"target, {n} tokens" for n in (1, 6, 16, 32, 64)
    ]
    assert rows[-2:] == ["cycle, 5-step chain", "cycle, 15-step chain"]


def test_benchmark_on_the_cpu_decodes_what_transformers_decodes() -> None:
    """That the tokens are equal is an assertion of its own."""
    words = ["--size", "qwen3.5-tiny", "--context", "40", "--tokens", "3", "--rounds", "1"]
    done = CliRunner().invoke(cpu.main, [*words, "--quantised"], env={"COLUMNS": "120"})
    assert done.exception is None, done.output
    cells = [line.split("│")[1:-1] for line in done.output.splitlines() if line.startswith("│")]
    rows = {name.strip(): [cell.strip() for cell in rest] for name, *rest in cells}
    theirs, plain = rows["transformers float32"], rows["trt-eagle3 float32"]
    assert float(plain[1]) == pytest.approx(float(plain[0]) / float(theirs[0]), abs=0.02)
    assert {name.removeprefix("trt-eagle3 ") for name in rows} == {
        "transformers float32",
        "float32",
        "int8",
        "int4",
        "int4, and the head",
        "matrix products alone",
    }


def test_products_of_the_cpu_are_all_of_the_decoder(tmp_path: Path) -> None:
    write_target(tmp_path, "qwen3.5-tiny")
    tensors = read_target(tmp_path).tensors
    wanted = {n for n, ref in tensors.items() if len(ref.shape) == 2} - {"embed_tokens.weight"}
    timed = [
        f"{name}.weight" for group in cpu.product_groups(read_target(tmp_path)) for name in group
    ]
    assert sorted(timed) == sorted(wanted)


def test_operations_of_a_prompt_are_those_of_every_layers_products(tmp_path: Path) -> None:
    write_target(tmp_path, "qwen3.5-9b")
    spec = read_target(tmp_path)
    layers = 1e9 * BILLIONS["qwen3.5-9b"] - 2 * spec.vocab_size * spec.hidden_size
    one, many = (prompt_operations(spec, n) / n for n in (1, 8192))
    assert one == pytest.approx(2 * layers, 0.02)
    heads = sum(a.num_heads * a.head_dim for _, a in spec.attention_layers)
    assert many - one == pytest.approx(2 * heads * 8191)
