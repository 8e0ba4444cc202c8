"""Random Qwen3.5s of odd geometry, as transformers writes them, against the whole model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families.qwen3.test_qwen3 import graph_logits, reference_logits
from tests.families.qwen3_vl_moe.test_qwen3_vl_moe import check_against
from tests.graph.test_target import PAGE_SIZE
from tests.hybrid import FULL, LINEAR, ROPE, save_qwen3_5, save_qwen3_5_text
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from trt_eagle3 import pipeline
from trt_eagle3.checkpoint.target import TargetCheckpoint, target_from_dict, target_to_dict
from trt_eagle3.decode.speculation.dynamic_tree import DynamicTree
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import family_of, read_target
from trt_eagle3.graph.decoder import Attention
from trt_eagle3.graph.ops.gated_delta import TREE_ROWS
from trt_eagle3.graph.target import target_graph
from trt_eagle3.graph.trt_export import check_plugins, trt_export
from trt_eagle3.parity.metrics import relative_error
from trt_eagle3.parity.reference.target import load_reference
from trt_eagle3.spec import GatedDeltaSpec, NormSpec

TEXT_IDS = torch.randint(40, (17,), generator=torch.Generator().manual_seed(1))
GEOMETRIES: dict[str, dict[str, Any]] = {
    "as written": {},
    "tied head, biases, one head group": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
    },
    "wide convolution, every second layer attends, whole rope": {
        "linear_conv_kernel_dim": 6,
        "layer_types": [FULL, LINEAR, FULL, LINEAR],
        "rope_parameters": ROPE | {"partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2]},
    },
}


@pytest.mark.parametrize("name", GEOMETRIES)
@torch.no_grad()
def test_graph_and_reference_equal_the_whole_text_model(name: str, tmp_path: Path) -> None:
    model = save_qwen3_5_text(tmp_path, **GEOMETRIES[name])
    spec = read_target(tmp_path)
    expected = model(TEXT_IDS[None]).logits[0]
    assert relative_error(reference_logits(spec, TEXT_IDS), expected) < FLOAT32_TOLERANCE
    assert relative_error(graph_logits(spec, TEXT_IDS), expected) < FLOAT32_TOLERANCE


@torch.no_grad()
def test_graph_and_reference_equal_the_whole_model_with_images(tmp_path: Path) -> None:
    model = save_qwen3_5(tmp_path)
    spec = read_target(tmp_path)
    assert family_of(spec).title == "Qwen3.5 (3.6 and 3.8 too)"
    assert spec.num_visual_levels == 0
    check_against(model, spec)


def _norms_without_the_one(_: pytest.MonkeyPatch, spec: TargetCheckpoint) -> TargetCheckpoint:
    return replace(spec, layers=tuple(replace(x, norm=NormSpec(x.norm.eps)) for x in spec.layers))


def _attention_ungated(patch: pytest.MonkeyPatch, spec: TargetCheckpoint) -> TargetCheckpoint:
    cut = Attention._cut_gate
    patch.setattr(Attention, "_cut_gate", lambda *args: (cut(*args)[0], None))
    return spec


@pytest.mark.parametrize("fault", [_norms_without_the_one, _attention_ungated])
@torch.no_grad()
def test_planted_fault_is_caught(
    fault: Callable[..., TargetCheckpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_qwen3_5_text(tmp_path)
    wrong = fault(monkeypatch, read_target(tmp_path))
    expected = model(TEXT_IDS[None]).logits[0]
    error = relative_error(graph_logits(wrong, TEXT_IDS), expected)
    assert error > FAULT_FLOOR * FLOAT32_TOLERANCE


def test_spec_survives_the_bundle(tmp_path: Path) -> None:
    save_qwen3_5(tmp_path)
    spec = read_target(tmp_path)
    found = target_from_dict(json.loads(json.dumps(target_to_dict(spec))))
    assert found.layers == spec.layers
    assert [k for k, _ in found.recurrent_layers] == [0, 1, 3]


def test_trace_has_the_graphs_names(tmp_path: Path) -> None:
    save_qwen3_5_text(tmp_path)
    spec = read_target(tmp_path)
    reference = load_reference(spec, torch.float32, "cpu")
    rope = reference.rope(torch.arange(5).expand(3, -1))
    graph = target_graph(spec, (), False, "float32", PAGE_SIZE, lambda _: "x")
    names = {name for node in graph.graph.node for name in node.output}
    for layer in reference.layers():
        trace = layer.trace(torch.randn(5, spec.hidden_size), rope)
        assert {name for name in trace if name.startswith("layers.")} <= names
        assert f"layers.{layer.index}.output" in trace


def test_tensorrt_has_plugins_for_all_of_it(tmp_path: Path) -> None:
    save_qwen3_5_text(tmp_path)
    graph = target_graph(read_target(tmp_path), (), False, "float16", PAGE_SIZE, lambda _: "x")
    check_plugins(graph)
    exported = trt_export(graph).model
    nodes = [node for node in exported.graph.node if node.op_type == "GatedDelta"]
    assert len(nodes) == sum(
        isinstance(x.mixer, GatedDeltaSpec) for x in read_target(tmp_path).layers
    )
    offsets = {a.f for n in exported.graph.node for a in n.attribute if a.name == "weight_offset"}
    assert offsets == {1.0}


def test_tree_of_more_rows_than_are_kept_is_refused_in_one_line(tmp_path: Path) -> None:
    save_qwen3_5_text(tmp_path)
    spec = read_target(tmp_path)
    pipeline._check_tree_rows(DynamicTree(8, 8, TREE_ROWS), spec)
    with pytest.raises(UserError, match=f"a tree of {TREE_ROWS + 1} tokens; .* at most") as caught:
        pipeline._check_tree_rows(DynamicTree(9, 8, TREE_ROWS + 1), spec)
    assert "\n" not in str(caught.value)


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too few layer types": (
        {"layer_types": [LINEAR, FULL]},
        "layer_types: expected 4 of them, got 2",
    ),
    "unknown layer type": (
        {"layer_types": [LINEAR, LINEAR, "sliding", LINEAR]},
        "layer_types: expected linear_attention or full_attention, got 'sliding'",
    ),
    "no layer that attends": (
        {"layer_types": [LINEAR] * 4},
        "layer_types: expected a layer of full_attention, got none",
    ),
    "layer types that contradict the tensors": (
        {"layer_types": [FULL, LINEAR, FULL, LINEAR]},
        "layer_types: layer 0 is full_attention, and the checkpoint has layers.0.linear_attn.",
    ),
    "heads that do not divide": (
        {"linear_num_value_heads": 3},
        "linear_num_value_heads: expected a multiple of linear_num_key_heads 2, got 3",
    ),
    "convolution of one row": (
        {"linear_conv_kernel_dim": 1},
        "linear_conv_kernel_dim: expected 2 or more, got 1",
    ),
    "odd rotary part": (
        {"rope_parameters": ROPE | {"partial_rotary_factor": 0.3}},
        "partial_rotary_factor: expected an even part of 16 channels, got 0.3",
    ),
    "no rotary part": (
        {"rope_parameters": ROPE | {"partial_rotary_factor": None}},
        "partial_rotary_factor: expected an even part of 16 channels, got None",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_contradictions_are_told_in_one_line(name: str, tmp_path: Path) -> None:
    save_qwen3_5_text(tmp_path)
    changes, message = BAD[name]
    change_config(tmp_path, **changes)
    with pytest.raises(UserError) as caught:
        read_target(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


MTP: dict[str, dict[str, Any]] = {
    "announced and absent": {"mtp_num_hidden_layers": 1},
    "of no number": {"mtp_num_hidden_layers": "one"},
    "a table of its own that is absent": {"mtp_use_dedicated_embeddings": True},
}


@pytest.mark.parametrize("name", MTP)
def test_read_target_config_of_an_absent_mtp_head_is_not_checked(name: str, tmp_path: Path) -> None:
    save_qwen3_5_text(tmp_path)
    tensors = read_target(tmp_path).tensors
    change_config(tmp_path, **MTP[name])
    spec = read_target(tmp_path)
    assert spec.mtp is None
    assert spec.tensors == tensors


def with_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    """Add tensors to a checkpoint of one file."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})


def test_read_target_text_alone_leaves_a_tower_unread(tmp_path: Path) -> None:
    save_qwen3_5_text(tmp_path)
    tensors = read_target(tmp_path).tensors
    with_tensors(tmp_path, **{"model.visual.pos_embed.weight": torch.zeros(3, dtype=torch.uint8)})
    spec = read_target(tmp_path)
    assert spec.vision is None
    assert spec.tensors.keys() == tensors.keys()
