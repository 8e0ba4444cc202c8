"""Random Qwen3-VL-MoEs of odd geometry, as transformers writes them, against the whole model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.graph.test_target import TargetRows, open_target, rows_of
from tests.moe import save_qwen3_vl_moe, with_layout
from tests.reference.compare import FLOAT32_TOLERANCE
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.families.registry import family_of, read_target
from trt_eagle3.parity.metrics import relative_error
from trt_eagle3.parity.reference.target import TargetReference, add_visual_level, load_reference

GRIDS = torch.tensor([[1, 4, 4], [2, 2, 4]])
IDS = torch.tensor([1, 7, 5, 5, 5, 5, 8, 3, 7, 6, 6, 8, 7, 6, 6, 8, 4])
KINDS = (IDS == 5).int() + 2 * (IDS == 6).int()
GEOMETRIES: dict[str, dict[str, Any]] = {
    "all layers sparse": {},
    "every second layer sparse, biases": {"decoder_sparse_step": 2, "attention_bias": True},
    "dense layer named": {"mlp_only_layers": [1], "num_experts": 7, "num_experts_per_tok": 3},
}


def prompt(reference: TargetReference, spec: TargetCheckpoint, patches: Tensor) -> TargetRows:
    """Its rows as the target gets them: embeddings with what the tower sees, levels by row."""
    positions, _ = reference.rope_index(IDS, GRIDS)
    seen, visual = reference.vision(patches, GRIDS), KINDS > 0
    embeds = reference.embed(IDS)
    embeds[visual] = seen.visual_embeds
    levels = torch.zeros(spec.num_visual_levels, len(IDS), spec.hidden_size)
    levels[:, visual] = seen.visual_levels
    return replace(
        rows_of(spec, 0),
        embeds=embeds,
        positions=positions.int(),
        visual=visual,
        visual_levels=levels,
    )


def reference_logits(reference: TargetReference, rows: TargetRows) -> Tensor:
    hidden, rope = rows.embeds, reference.rope(rows.positions)
    levels = rows.visual_levels[:, rows.visual]
    for layer in reference.layers():
        hidden = add_visual_level(layer(hidden, rope), levels, layer.index, rows.visual)
    return reference.head(reference.norm(hidden))


def check_against(model: Any, spec: TargetCheckpoint) -> None:
    """Reference and graph of ``spec`` give the logits of the whole model, of an image and a
    video.
    """
    patches = torch.randn(32, spec.require_vision().patch_dim)
    expected = model(
        input_ids=IDS[None],
        mm_token_type_ids=KINDS[None],
        pixel_values=patches[:16],
        image_grid_thw=GRIDS[:1],
        pixel_values_videos=patches[16:],
        video_grid_thw=GRIDS[1:],
    ).logits[0]
    reference = load_reference(spec, torch.float32, "cpu")
    rows = prompt(reference, spec, patches)
    assert relative_error(reference_logits(reference, rows), expected) < FLOAT32_TOLERANCE
    logits, _ = rows.run(open_target(spec, ()), [5])
    assert relative_error(logits, expected) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("layout", ["stacked", "transposed", "single"])
@pytest.mark.parametrize("name", GEOMETRIES)
@torch.no_grad()
def test_graph_and_reference_equal_the_whole_model(name: str, layout: Any, tmp_path: Path) -> None:
    model = save_qwen3_vl_moe(tmp_path, **GEOMETRIES[name])
    with_layout(tmp_path, model, layout)
    spec = read_target(tmp_path)
    assert family_of(spec).title == "Qwen3-VL-MoE"
    check_against(model, spec)
