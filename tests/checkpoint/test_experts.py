"""Experts in every layout on disk are one weight, or refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.moe import Layout, save_qwen3_moe, save_qwen3_vl_moe, with_layout
from trt_eagle3.checkpoint.experts import ExpertsRef
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.builder.weight_quantiser import quantise_target
from trt_eagle3.engine.runtime.weights import materialise
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.weight_formats import format_of
from trt_eagle3.graph.weights import WeightExpr, expert_parts
from trt_eagle3.parity.metrics import relative_error
from trt_eagle3.parity.reference.dequantise import read_values

FLOAT32 = dtype_named("float32")
PREFIX = "model.layers.1.mlp.experts."


def made(spec: TargetCheckpoint, name: str, half_scale: float = 1.0) -> Tensor:
    """The weight as an engine makes it."""
    ref = spec.tensors[name]
    assert isinstance(ref, ExpertsRef)
    parts = expert_parts(ref, lambda r: r.file.name, half_scale)
    expr = WeightExpr(parts, FLOAT32, format_of(ref.parts), ref.shape[0])
    assert expr.shape == ref.shape
    return materialise(expr, ref.file.parent, FLOAT32)


@pytest.mark.parametrize("layout", get_args(Layout))
def test_experts_of_every_layout_are_made_alike(layout: Layout, tmp_path: Path) -> None:
    """As the engine makes them, and as parity reads them, are the values that were written."""
    values = with_layout(tmp_path, save_qwen3_moe(tmp_path), layout)
    spec = read_target(tmp_path)
    for name, value in values.items():
        canonical = name.removeprefix("model.")
        assert torch.equal(made(spec, canonical), value)
        assert torch.equal(read_values(spec.tensors[canonical]).float(), value)


@pytest.mark.parametrize("layout", get_args(Layout))
def test_factor_of_up_is_on_the_second_half_of_each_expert(layout: Layout, tmp_path: Path) -> None:
    values = with_layout(tmp_path, save_qwen3_moe(tmp_path), layout)
    gate_up = values[f"{PREFIX}gate_up_proj"].clone()
    gate_up[:, gate_up.shape[1] // 2 :] *= 0.25
    found = made(read_target(tmp_path), "layers.1.mlp.experts.gate_up_proj", 0.25)
    assert torch.equal(found, gate_up)


def test_stacked_experts_of_the_engines_type_are_mapped_not_copied(tmp_path: Path) -> None:
    with_layout(tmp_path, save_qwen3_moe(tmp_path), "stacked")
    ref = read_target(tmp_path).tensors["layers.1.mlp.experts.down_proj"]
    assert isinstance(ref, ExpertsRef)
    expr = WeightExpr(expert_parts(ref, lambda r: r.file.name), FLOAT32, "dense", ref.shape[0])
    assert expr.is_stored


def test_fp8_experts_are_counted(tmp_path: Path) -> None:
    with_layout(tmp_path, save_qwen3_moe(tmp_path), "fp8 stacked")
    quantisation = read_target(tmp_path).quantisation
    assert quantisation is not None
    assert dict(quantisation.weights) == {"FP8 (e4m3) block 16 x 8": 2 * 3 * 5}


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(
        {n: t.contiguous() for n, t in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


@pytest.mark.parametrize("layout", ["stacked", "transposed", "single"])
@pytest.mark.parametrize(("weights", "error"), [("fp8", 0.04), ("int4", 0.2)])
def test_experts_are_quantised_by_the_build(
    weights: str, error: float, layout: Layout, tmp_path: Path
) -> None:
    """Every layout gives the same numbers, near the 16-bit ones."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "head_dim": 16}
    values = with_layout(tmp_path, save_qwen3_moe(tmp_path, **sizes), layout)
    spec = quantise_target(read_target(tmp_path), weights, tmp_path / "made" / "made.safetensors")
    for name, value in values.items():
        canonical = name.removeprefix("model.")
        found = made(spec, canonical)
        assert torch.equal(found, read_values(spec.tensors[canonical]))
        assert relative_error(found, value) < error
        assert relative_error(found.roll(1, 0), value) > 1


REFUSED: dict[str, tuple[Layout, Callable[[dict[str, Tensor]], Any], str]] = {
    "router missing": (
        "single",
        lambda t: t.pop("model.layers.1.mlp.gate.weight"),
        r"layers\.1\.mlp\.gate\.weight missing",
    ),
    "expert missing": (
        "single",
        lambda t: t.pop(f"{PREFIX}3.up_proj.weight"),
        r"experts\.3\.up_proj\.weight missing; its config has 5 experts",
    ),
    "stack missing": (
        "stacked",
        lambda t: t.pop(f"{PREFIX}down_proj"),
        r"experts\.down_proj missing",
    ),
    "one expert more than the config says": (
        "single",
        lambda t: t.update({f"{PREFIX}5.up_proj.weight": torch.ones(20, 24)}),
        r"experts\.5\.up_proj\.weight surplus",
    ),
    "stack of other experts than the config says": (
        "stacked",
        lambda t: t.update({f"{PREFIX}gate_up_proj": torch.ones(6, 40, 24)}),
        r"gate_up_proj: expected shape \[5, 40, 24\] or \[5, 24, 40\] .*got \[6, 40, 24\]",
    ),
    "two layouts at once": (
        "stacked",
        lambda t: t.update({f"{PREFIX}2.up_proj.weight": torch.ones(20, 24)}),
        "two layouts at once, stacked and one by one",
    ),
    "one projection transposed": (
        "stacked",
        lambda t: t.update({f"{PREFIX}down_proj": torch.ones(5, 20, 24)}),
        "one is .experts, out, in., the other .experts, in, out.",
    ),
    "FP8 without scales": (
        "fp8 stacked",
        lambda t: t.pop(f"{PREFIX}gate_up_proj_scale_inv"),
        "gate_up_proj_scale_inv missing",
    ),
    "FP8 with scales of another block": (
        "fp8 stacked",
        lambda t: t.update({f"{PREFIX}gate_up_proj_scale_inv": torch.ones(5, 1, 1)}),
        r"gate_up_proj_scale_inv: expected shape \[5, 3, 3\]",
    ),
    "FP8 with a scale of zero": (
        "fp8 transposed",
        lambda t: t[f"{PREFIX}down_proj_scale_inv"].zero_(),
        "expected scales above 0, got 0",
    ),
    "whole numbers": (
        "stacked",
        lambda t: t.update({f"{PREFIX}down_proj": torch.ones(5, 24, 20, dtype=torch.int32)}),
        "down_proj: expected one of F32, .*, got I32",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_experts_that_are_not_sound_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    layout, change, message = REFUSED[case]
    with_layout(tmp_path, save_qwen3_moe(tmp_path), layout)
    edit(tmp_path, change)
    with pytest.raises(UserError, match=message) as caught:
        read_target(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_square_stack_does_not_tell_its_layout(tmp_path: Path) -> None:
    """2 I = H: transformers itself would take either for [experts, out, in]."""
    model = save_qwen3_moe(tmp_path, moe_intermediate_size=12)
    with_layout(tmp_path, model, "transposed")
    with pytest.raises(UserError, match=r"shape of both .* Save one tensor for each expert"):
        read_target(tmp_path)
    values = with_layout(tmp_path, model, "single")
    found = made(read_target(tmp_path), "layers.1.mlp.experts.gate_up_proj")
    assert torch.equal(found, values[f"{PREFIX}gate_up_proj"])


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "more for a token than there are": (
        {"num_experts_per_tok": 6},
        "num_experts_per_tok: expected at most num_experts = 5, got 6",
    ),
    "two counts": ({"num_local_experts": 7}, "expected one number of experts"),
    "a dense layer that is not there": (
        {"mlp_only_layers": [3]},
        "mlp_only_layers: expected layers 0 to 2, got 3",
    ),
    "not renormalised": ({"norm_topk_prob": False}, "norm_topk_prob: expected true, got false"),
    "no step": ({"decoder_sparse_step": 0}, "decoder_sparse_step: expected a whole number"),
    "endless experts": (
        {"num_experts": 10**9, "num_local_experts": 10**9},
        "num_experts: expected at most 16384",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_counts_that_contradict_each_other_are_refused_in_one_line(
    case: str, tmp_path: Path
) -> None:
    changes, message = CONFIGS[case]
    save_qwen3_vl_moe(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"]
    text |= {"num_experts": 5} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message) as caught:
        read_target(tmp_path)
    assert "\n" not in str(caught.value)
