"""Random Qwen3.5-MoEs of odd geometry, as transformers writes them, against the whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families.qwen3.test_qwen3 import graph_logits, reference_logits
from tests.families.qwen3_5.test_qwen3_5 import TEXT_IDS, change_config
from tests.families.qwen3_vl_moe.test_qwen3_vl_moe import check_against
from tests.graph.test_target import PAGE_SIZE
from tests.hybrid import FULL, LINEAR, ROPE, save_qwen3_5_moe, save_qwen3_5_moe_text
from tests.moe import quantised, with_layout
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from trt_eagle3.checkpoint.target import TargetCheckpoint, target_from_dict, target_to_dict
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import family_of, read_target
from trt_eagle3.graph.target import target_graph
from trt_eagle3.parity.metrics import relative_error
from trt_eagle3.parity.reference.target import load_reference
from trt_eagle3.spec import SparseMoe

GEOMETRIES: dict[str, dict[str, Any]] = {
    "as written": {},
    "tied head, biases, more experts for a token": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "num_experts": 9,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 28,
        "shared_expert_intermediate_size": 12,
    },
    "one expert for a token, every second layer attends, whole rope": {
        "num_experts_per_tok": 1,
        "layer_types": [FULL, LINEAR, FULL, LINEAR],
        "rope_parameters": ROPE | {"partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2]},
    },
}
FP8_PROJECTIONS = (
    *(f"self_attn.{p}_proj.weight" for p in "qkvo"),
    *(f"linear_attn.{p}.weight" for p in ("in_proj_qkv", "in_proj_z", "out_proj")),
    *(f"shared_expert.{p}_proj.weight" for p in ("gate", "up", "down")),
)
"""Of Qwen's own FP8 checkpoints, beside the experts."""


@pytest.mark.parametrize("name", GEOMETRIES)
@torch.no_grad()
def test_graph_and_reference_equal_the_whole_text_model(name: str, tmp_path: Path) -> None:
    model = save_qwen3_5_moe_text(tmp_path, **GEOMETRIES[name])
    spec = read_target(tmp_path)
    assert family_of(spec).title == "Qwen3.5-MoE (3.6 and 3.8 too), text-only"
    expected = model(TEXT_IDS[None]).logits[0]
    assert relative_error(reference_logits(spec, TEXT_IDS), expected) < FLOAT32_TOLERANCE
    assert relative_error(graph_logits(spec, TEXT_IDS), expected) < FLOAT32_TOLERANCE


@torch.no_grad()
def test_graph_and_reference_equal_the_whole_model_with_images(tmp_path: Path) -> None:
    model = save_qwen3_5_moe(tmp_path)
    spec = read_target(tmp_path)
    assert family_of(spec).title == "Qwen3.5-MoE (3.6 and 3.8 too)"
    assert spec.num_visual_levels == 0
    assert {layer.mlp for layer in spec.layers} == {SparseMoe(5, 2, 20, True, 28)}
    assert target_from_dict(target_to_dict(spec)).layers == spec.layers
    check_against(model, spec)


@pytest.mark.parametrize("layout", ["stacked", "transposed", "fp8 stacked", "fp8 single"])
@torch.no_grad()
def test_graph_over_another_layout_equals_the_reference(layout: Any, tmp_path: Path) -> None:
    """transformers writes experts one by one; published are stacks, and one by one in FP8."""
    model = save_qwen3_5_moe_text(tmp_path)
    with_layout(tmp_path, model, layout)
    spec = read_target(tmp_path)
    expected = reference_logits(spec, TEXT_IDS)
    assert relative_error(graph_logits(spec, TEXT_IDS), expected) < FLOAT32_TOLERANCE
    if not layout.startswith("fp8"):
        assert relative_error(model(TEXT_IDS[None]).logits[0], expected) < FLOAT32_TOLERANCE


@torch.no_grad()
def test_projections_in_fp8_are_read_as_published(tmp_path: Path) -> None:
    """Blocks with scales in bfloat16; what is small stays as it was."""
    with_layout(tmp_path, save_qwen3_5_moe_text(tmp_path), "fp8 single")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [n for n in tensors if n.endswith(FP8_PROJECTIONS)]:
        codes, scales = quantised(tensors[name])
        tensors |= {name: codes, f"{name}_scale_inv": scales.bfloat16()}
    save_file(tensors, file, {"format": "pt"})
    spec = read_target(tmp_path)
    assert spec.tensors["layers.0.linear_attn.in_proj_qkv.weight"].dtype == "F8_E4M3"
    assert spec.tensors["layers.0.linear_attn.in_proj_a.weight"].dtype == "F32"
    expected = reference_logits(spec, TEXT_IDS)
    assert relative_error(graph_logits(spec, TEXT_IDS), expected) < FLOAT32_TOLERANCE


def test_trace_has_the_shared_expert_and_the_graphs_names(tmp_path: Path) -> None:
    save_qwen3_5_moe_text(tmp_path)
    spec = read_target(tmp_path)
    reference = load_reference(spec, torch.float32, "cpu")
    rope = reference.rope(torch.arange(5).expand(3, -1))
    graph = target_graph(spec, (), False, "float32", PAGE_SIZE, lambda _: "x")
    names = {name for node in graph.graph.node for name in node.output}
    for layer in reference.layers():
        trace = layer.trace(torch.randn(5, spec.hidden_size), rope)
        prefix = f"layers.{layer.index}.mlp."
        assert {name for name in trace if name.startswith("layers.")} <= names
        assert trace[f"{prefix}shared_expert.gate_logit"].shape == (5, 1)
        assert trace[f"{prefix}shared_expert.mlp.output"].shape == (5, spec.hidden_size)


def _with_mlp(spec: TargetCheckpoint, **changes: Any) -> TargetCheckpoint:
    """``spec`` whose mixtures are others."""
    layers = []
    for layer in spec.layers:
        assert isinstance(layer.mlp, SparseMoe)
        layers.append(replace(layer, mlp=replace(layer.mlp, **changes)))
    return replace(spec, layers=tuple(layers))


def _forget_gate(patch: pytest.MonkeyPatch, spec: TargetCheckpoint) -> TargetCheckpoint:
    """A gate that is always open."""
    from trt_eagle3.graph.builder import GraphBuilder

    right = GraphBuilder.op

    def op(self: GraphBuilder, kind: str, *inputs: Any, **options: Any) -> Any:
        shared, logit, *_ = [*inputs, None]
        opened = kind == "Mul" and logit is not None and logit.name.endswith("shared_expert.gate")
        return shared if opened else right(self, kind, *inputs, **options)

    patch.setattr(GraphBuilder, "op", op)
    return spec


FAULTS: dict[str, Callable[[pytest.MonkeyPatch, TargetCheckpoint], TargetCheckpoint]] = {
    "the shared expert's gate is forgotten": _forget_gate,
    "the shared expert is left out": lambda _, spec: _with_mlp(spec, shared_expert_width=0),
    "the router does not renormalise": lambda _, spec: _with_mlp(spec, renormalise=False),
}


@pytest.mark.parametrize("fault", FAULTS)
@torch.no_grad()
def test_planted_fault_is_caught(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_qwen3_5_moe_text(tmp_path)
    spec = FAULTS[fault](monkeypatch, read_target(tmp_path))
    expected = model(TEXT_IDS[None]).logits[0]
    assert relative_error(graph_logits(spec, TEXT_IDS), expected) > FAULT_FLOOR


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a dense one's architecture": (
        {"architectures": ["Qwen3_5ForCausalLM"]},
        "expected a Qwen3.5 (Qwen3_5MoeForCausalLM), got architecture 'Qwen3_5ForCausalLM'",
    ),
    "a router that would not renormalise": (
        {"norm_topk_prob": False},
        "norm_topk_prob: expected true, got false",
    ),
    "more experts for a token than there are": (
        {"num_experts_per_tok": 6},
        "num_experts_per_tok: expected at most num_experts = 5, got 6",
    ),
    "a shared expert of another width": (
        {"shared_expert_intermediate_size": 24},
        "shared_expert.gate_proj.weight: expected shape [24, 24] by config.json, got [28, 24]",
    ),
    "no width of the shared expert": (
        {"shared_expert_intermediate_size": None},
        "shared_expert_intermediate_size: expected a whole number of at least 1, got None",
    ),
    "more experts than are stored": (
        {"num_experts": 6},
        "layers.0.mlp.experts.5.gate_proj.weight missing; its config has 6 experts.",
    ),
    "layer types that contradict the tensors": (
        {"layer_types": [FULL, LINEAR, FULL, LINEAR]},
        "layer_types: layer 0 is full_attention, and the checkpoint has layers.0.linear_attn.",
    ),
    "a dense one's type": (
        {"model_type": "qwen3_5_text"},
        "expected a Qwen3.5 (Qwen3_5ForCausalLM)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_contradictions_are_told_in_one_line(name: str, tmp_path: Path) -> None:
    save_qwen3_5_moe_text(tmp_path)
    changes, message = BAD[name]
    change_config(tmp_path, **changes)
    with pytest.raises(UserError) as caught:
        read_target(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
