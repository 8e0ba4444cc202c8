"""Experts as they are packed for the kernels: the same values as each weight by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import moe
from tests.engine.torch.test_packed import values_of
from tests.quantised import PACKERS
from tests.quantised import pack as quantise
from trt_eagle3.checkpoint.experts import ExpertsRef
from trt_eagle3.checkpoint.model_config import ModelConfig
from trt_eagle3.checkpoint.quantised.read import open_weights
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.runtime.weights import materialise
from trt_eagle3.engine.torch.moe import Experts, Fp8Experts, Int4Experts, pack_experts
from trt_eagle3.engine.torch.packed import Fp8Weight, Int4Weight
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.weight_formats import format_of
from trt_eagle3.graph.weights import WeightExpr, expert_parts, part_of

CPU = torch.device("cpu")
F32, BF16 = dtype_named("float32"), dtype_named("bfloat16")
EXPERTS, HIDDEN, WIDTH = 3, 384, 128
SHAPES = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
Exprs = tuple[WeightExpr, WeightExpr]


def expressions(name: str, folder: Path) -> Exprs:
    """gate_up and down of experts stored one by one in the format ``name``; up is halved."""
    prefix = "model.language_model.layers.0.mlp.experts."
    packer, claim = PACKERS[name]
    drawn = torch.Generator().manual_seed(0)
    dense = {
        f"{prefix}{expert}.{kind}_proj.weight": torch.randn(shape, generator=drawn)
        for expert in range(EXPERTS)
        for kind, shape in SHAPES.items()
    }
    save_file(quantise(dense, packer), folder / "model.safetensors")
    config = ModelConfig({"quantization_config": claim}, folder / "config.json")
    tensors, _ = open_weights(config, (("model.language_model.", ""),))

    def expr(kinds: tuple[str, ...]) -> WeightExpr:
        refs = [
            (tensors[f"layers.0.mlp.experts.{e}.{kind}_proj.weight"], 0.5 if kind == "up" else 1.0)
            for e in range(EXPERTS)
            for kind in kinds
        ]
        parts = tuple(part_of(ref, lambda r: r.file.name, scale) for ref, scale in refs)
        return WeightExpr(parts, BF16, format_of([ref for ref, _ in refs]), EXPERTS)

    return expr(("gate", "up")), expr(("down",))


def flat(experts: Experts) -> Fp8Weight | Int4Weight:
    """The matrices of all experts as one."""
    if isinstance(experts, Fp8Experts):
        return Fp8Weight(experts.codes.flatten(0, 1), experts.scale.flatten(0, 1))
    assert isinstance(experts, Int4Experts)
    zeros = None if experts.zero_point is None else experts.zero_point.flatten(0, 1)
    return Int4Weight(experts.codes.flatten(0, 1), experts.scale.flatten(0, 1), zeros)


def check(packed: tuple[Experts, Experts] | None, exprs: Exprs, root: Path) -> None:
    assert packed is not None
    for experts, expr in zip(packed, exprs, strict=True):
        expected: Tensor = materialise(replace(expr, dtype=F32), root, F32)
        found = values_of(flat(experts)).view(expected.shape)
        torch.testing.assert_close(found, expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("name", ["fp8-channel", "awq", "gptq", "int8"])
def test_pack_experts_has_the_values_of_each_or_declines(name: str, tmp_path: Path) -> None:
    exprs = expressions(name, tmp_path)
    packed = pack_experts(exprs, tmp_path, CPU)
    if name == "int8":
        assert packed is None, "no kernel multiplies with INT8 experts"
        return
    check(packed, exprs, tmp_path)


@pytest.mark.parametrize("layout", ["fp8 stacked", "fp8 transposed", "fp8 single"])
def test_pack_experts_reads_every_layout_of_fp8_blocks(
    layout: moe.Layout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(moe, "BLOCK", (128, 128))
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_experts": EXPERTS}
    model = moe.save_qwen3_moe(tmp_path, **sizes, num_hidden_layers=1)
    moe.with_layout(tmp_path, model, layout)
    tensors = read_target(tmp_path).tensors

    def expr(kind: str, scale: float) -> WeightExpr:
        ref = tensors[f"layers.0.mlp.experts.{kind}_proj"]
        assert isinstance(ref, ExpertsRef)
        parts = expert_parts(ref, lambda r: r.file.name, scale)
        return WeightExpr(parts, BF16, format_of(ref.parts), EXPERTS)

    exprs = expr("gate_up", 0.5), expr("down", 1.0)
    packed = pack_experts(exprs, tmp_path, CPU, activations="fp8")
    check(packed, exprs, tmp_path)
    assert packed is not None
    assert all(isinstance(p, Fp8Experts) for p in packed)
    assert all(p.fp8_activations for p in packed if isinstance(p, Fp8Experts))


def test_pack_experts_declines_a_width_that_is_no_multiple_of_128(tmp_path: Path) -> None:
    model = moe.save_qwen3_moe(tmp_path, hidden_size=HIDDEN, num_hidden_layers=1)
    moe.with_layout(tmp_path, model, "fp8 single")
    tensors = read_target(tmp_path).tensors
    exprs = []
    for kind in ("gate_up", "down"):
        ref = tensors[f"layers.0.mlp.experts.{kind}_proj"]
        assert isinstance(ref, ExpertsRef)
        parts = expert_parts(ref, lambda r: r.file.name)
        exprs.append(WeightExpr(parts, BF16, format_of(ref.parts), ref.shape[0]))
    assert pack_experts((exprs[0], exprs[1]), tmp_path, CPU) is None
