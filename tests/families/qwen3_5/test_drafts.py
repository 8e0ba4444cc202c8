"""EAGLE-3 drafts of a Qwen3.5: aux states of layers of both kinds, producers' layouts as they are
seen for it, and drafts of another target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.drafts import (
    Geometry,
    write_angelslim_draft,
    write_generic_draft,
    write_specforge_draft,
    write_speculators_draft,
)
from tests.families.qwen3_5.test_qwen3_5 import TEXT_IDS
from tests.graph.test_target import TargetRows, open_target, rows_of
from tests.hybrid import save_qwen3_5_moe_text, save_qwen3_5_text
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.target import target_graph
from trt_eagle3.parity.metrics import relative_error

SAVED: dict[str, Callable[..., Any]] = {
    "dense": save_qwen3_5_text,
    "moe": save_qwen3_5_moe_text,
}
LINEAR_LAYERS, FULL_LAYER, LAST = (0, 1), 2, 3


def aux_states(spec: TargetCheckpoint, layers: tuple[int, ...]) -> Tensor:
    """What the graph captures of ``TEXT_IDS`` [S, layers * H]."""
    runner = open_target(spec, layers)
    rows = rows_of(spec, 0)
    positions = torch.arange(len(TEXT_IDS), dtype=torch.int32).repeat(3, 1)
    embeds = runner.embedding.lookup(TEXT_IDS)
    text = TargetRows(embeds, positions, rows.visual & False, rows.visual_levels)
    _, aux = text.run(runner, [5])
    assert aux is not None
    return aux


def layer_outputs(model: Any) -> list[Tensor]:
    """transformers' output of each layer, of ``TEXT_IDS``."""
    found: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _module, _inputs, output: found.append(output[0]))
        for layer in model.model.layers
    ]
    model(TEXT_IDS[None])
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("kind", SAVED)
@torch.no_grad()
def test_aux_states_are_captured_at_every_kind_of_layer(kind: str, tmp_path: Path) -> None:
    model = SAVED[kind](tmp_path)
    spec = read_target(tmp_path)
    recurrent = {k for k, _ in spec.recurrent_layers}
    assert recurrent == {*LINEAR_LAYERS, LAST}
    outputs = layer_outputs(model)
    for wanted in (LINEAR_LAYERS, (FULL_LAYER,), (1, FULL_LAYER, LAST)):
        found = aux_states(spec, wanted)
        expected = torch.cat([outputs[k] for k in wanted], dim=-1)
        assert relative_error(found, expected) < FLOAT32_TOLERANCE, wanted
        earlier = torch.cat([outputs[k - 1] for k in wanted], dim=-1)
        assert relative_error(found, earlier) > FAULT_FLOOR, "a layer too early is caught"


def test_graph_refuses_a_layer_that_is_never_computed(tmp_path: Path) -> None:
    save_qwen3_5_text(tmp_path)
    with pytest.raises(UserError, match="layer 4 does not exist in a target of 4 layers") as e:
        target_graph(read_target(tmp_path), (0, 2, 4), False, "float32", 4, lambda _: "x")
    assert "\n" not in str(e.value)


OF_TARGET: dict[str, Any] = {
    "rope_type": "default",
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
"""The target's own, which turns half of a head."""
WHOLE_HEADS = {"rope_type": "default", "partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2]}
GEOMETRY = replace(
    Geometry(), hidden=24, target_hidden=24, vocab=40, draft_vocab=20, target_layers=4, base=1e7
)
LAYOUTS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "SpecForge's, without a rope": (write_specforge_draft, {"aux": [0, 1, 2]}, ""),
    "SpecForge's, with the target's": (
        write_specforge_draft,
        {"aux": [0, 1, 2], "rope": OF_TARGET},
        "partial_rotary_factor 0.5 is ignored, as in specforge's training code",
    ),
    "speculators', over whole heads": (
        write_speculators_draft,
        {"aux": [1, 2, 3], "rope": WHOLE_HEADS},
        "mrope_section is ignored",
    ),
    "speculators', with the target's": (
        write_speculators_draft,
        {"aux": [1, 2, 3], "rope": OF_TARGET},
        "partial_rotary_factor 0.5 is ignored, as in speculators's training code",
    ),
}


def read(folder: Path, spec: TargetCheckpoint) -> DraftManifest:
    return read_draft(folder / "draft", spec)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetCheckpoint:
    folder = tmp_path_factory.mktemp("target")
    save_qwen3_5_text(folder)
    return read_target(folder)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_read_as_they_were_trained(
    name: str, target: TargetCheckpoint, tmp_path: Path
) -> None:
    """One axis over whole heads of 16, base 1e7, after layers of linear and of full attention."""
    write, options, warning = LAYOUTS[name]
    write(tmp_path / "draft", GEOMETRY, **options)
    found = read(tmp_path, target)
    assert found.aux_layers == (0, 1, 2)
    assert (found.rope.layout, found.rope.base, len(found.rope.inv_freq)) == ("1d", 1e7, 8)
    assert not warning or any(warning in told for told in found.warnings)


def test_state_after_the_last_layer_is_that_layers_output(
    target: TargetCheckpoint, tmp_path: Path
) -> None:
    write_speculators_draft(tmp_path / "draft", GEOMETRY, aux=[1, 3, 4])
    assert read(tmp_path, target).aux_layers == (0, 2, LAST)


def _sized(**sizes: Any) -> tuple[Callable[..., Any], Geometry, dict[str, Any]]:
    return write_specforge_draft, replace(GEOMETRY, **sizes), {}


FIX = "Use the draft that was trained for this target"
FOREIGN: dict[str, tuple[Callable[..., Any], Geometry, dict[str, Any], str]] = {
    "another width": (
        *_sized(hidden=32, target_hidden=32),
        "a draft for hidden size 32 (fc.weight [32, 96] takes 3 aux states), the target's is 24",
    ),
    "another vocabulary": (
        *_sized(vocab=48),
        "a draft for a vocabulary of 48 (config.json vocab_size), the target's is 40",
    ),
    "heads of another size than its config says": (
        *(write_specforge_draft, GEOMETRY, {"head_dim": 32}),
        "4 heads and 2 key-value heads of head_dim 32 (config.json) do not give q_proj's 64",
    ),
    "a rope of other heads": (
        *(write_angelslim_draft, GEOMETRY),
        {"target_model_type": "qwen3_5", "rope": {"type": "mrope", "mrope_section": [24, 20, 20]}},
        "mrope_section [24, 20, 20]: expected 3 counts that sum to half of the channels",
    ),
    "a part of a head, by nobody that is known": (
        *(write_generic_draft, GEOMETRY, {"rope_scaling": OF_TARGET}),
        "partial_rotary_factor: expected 1, got 0.5: not supported",
    ),
    "sizes that fit, and another target's name": (
        *(write_angelslim_draft, GEOMETRY, {}),
        f"target_model_type: a draft for 'qwen3_vl', the target is qwen3_5_text. {FIX}",
    ),
    "a layer that the target does not have": (
        *(write_specforge_draft, GEOMETRY, {"aux": [1, 3, 5]}),
        "aux layer 5 (eagle_config.eagle_aux_hidden_state_layer_ids [1, 3, 5], out(k) ids) is out "
        "of range: the target has layers 0 to 3",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_draft_of_another_target_is_refused_in_one_line(
    name: str, target: TargetCheckpoint, tmp_path: Path
) -> None:
    write, geometry, options, message = FOREIGN[name]
    write(tmp_path / "draft", geometry, **options)
    with pytest.raises(UserError) as caught:
        read(tmp_path, target)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("named", ["qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"])
def test_names_of_the_targets_own_kin_are_taken(
    named: str, target: TargetCheckpoint, tmp_path: Path
) -> None:
    write_specforge_draft(tmp_path / "draft", GEOMETRY, aux=[0, 1, 2], target_model_type=named)
    assert read(tmp_path, target).aux_layers == (0, 1, 2)
