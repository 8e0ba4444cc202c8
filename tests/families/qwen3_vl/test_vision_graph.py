"""The vision graph against transformers on random towers and grids."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.reference.checkpoint import file_name
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from tests.reference.target import VISION, Target, random_target
from trt_eagle3.decode.request.vision_encoder import VisionRunner
from trt_eagle3.engine.onnxruntime.session import OnnxRuntimeSession
from trt_eagle3.errors import UserError
from trt_eagle3.families.qwen3_vl.vision_graph import VISION_INPUTS, vision_graph
from trt_eagle3.families.qwen3_vl.vision_rows import vision_rows
from trt_eagle3.parity.metrics import relative_error
from trt_eagle3.spec import TargetSpec

IMAGES_AND_VIDEO = [[1, 2, 2], [3, 4, 6], [1, 8, 2]]


def open_vision(spec: TargetSpec) -> VisionRunner:
    path = spec.path / "vision.onnx"
    path.write_bytes(vision_graph(spec, "float32", file_name).SerializeToString())
    return VisionRunner(
        OnnxRuntimeSession(path, spec.path), merge_size=spec.vision.spatial_merge_size
    )


def rows_of(spec: TargetSpec, grids: list[list[int]]) -> dict[str, Tensor]:
    vision = spec.vision
    side = round(vision.num_position_embeddings**0.5)
    return vision_rows(torch.tensor(grids), vision.spatial_merge_size, side).inputs()


def patches_of(spec: TargetSpec, grids: list[list[int]], seed: int) -> Tensor:
    count = sum(t * h * w for t, h, w in grids)
    return torch.randn(count, spec.vision.patch_dim, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def reference(
    target: Target, patches: Tensor, grids: list[list[int]]
) -> tuple[Tensor, list[Tensor]]:
    out = target.model.model.visual(patches, grid_thw=torch.tensor(grids))
    return out.pooler_output, out.deepstack_features


@st.composite
def towers(draw: st.DrawFn) -> dict[str, Any]:
    depth, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return {
        "depth": depth,
        "num_heads": heads,
        "hidden_size": heads * 4 * draw(st.integers(1, 4)),
        "intermediate_size": draw(st.sampled_from([9, 24])),
        "in_channels": draw(st.sampled_from([1, 3])),
        "patch_size": draw(st.integers(1, 3)),
        "temporal_patch_size": draw(st.integers(1, 2)),
        "spatial_merge_size": draw(st.sampled_from([1, 2])),
        "num_position_embeddings": draw(st.integers(2, 6)) ** 2,
        "deepstack_visual_indexes": draw(
            st.lists(st.integers(0, depth - 1), unique=True).map(sorted)
        ),
        "hidden_act": draw(st.sampled_from(["gelu_pytorch_tanh", "gelu", "silu"])),
    }


@settings(max_examples=40)
@given(
    tower=towers(),
    cells=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3
    ),
    stored=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_vision_of_any_tower_and_grids_equals_transformers(
    tower: dict[str, Any], cells: list[tuple[int, int, int]], stored: torch.dtype, seed: int
) -> None:
    merge = tower["spatial_merge_size"]
    grids = [[t, h * merge, w * merge] for t, h, w in cells]
    with tempfile.TemporaryDirectory() as directory:
        target = random_target(Path(directory), vision=tower, stored=stored, seed=seed)
        patches = patches_of(target.spec, grids, seed)
        embeds, levels = open_vision(target.spec).forward(patches, rows_of(target.spec, grids))
        expected, expected_levels = reference(target, patches, grids)
    assert relative_error(embeds, expected) < FLOAT32_TOLERANCE
    assert len(expected_levels) == len(tower["deepstack_visual_indexes"])
    assert (levels is None) == (not expected_levels)
    for i, level in enumerate(expected_levels):
        assert levels is not None
        assert relative_error(levels[i], level) < FLOAT32_TOLERANCE, f"level {i}"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return random_target(tmp_path_factory.mktemp("vision"), vision=VISION, seed=3)


def error(target: Target, rows: dict[str, Tensor], spec: TargetSpec | None = None) -> float:
    """Error of embeddings or levels, whichever is larger."""
    patches = patches_of(target.spec, IMAGES_AND_VIDEO, 4)
    embeds, levels = open_vision(spec or target.spec).forward(patches, rows)
    expected, expected_levels = reference(target, patches, IMAGES_AND_VIDEO)
    assert levels is not None
    return max(
        relative_error(embeds, expected), relative_error(levels, torch.stack(expected_levels))
    )


def one_frame(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every patch attends to every image and frame: what a lost ``cu_seqlens`` would do."""
    return {**rows, "frame_starts": rows["frame_starts"][[0, -1]]}


def seeing_its_neighbour(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first frame takes the second's first patch for its own."""
    starts = rows["frame_starts"].clone()
    starts[1] += 1
    return {**rows, "frame_starts": starts}


@pytest.mark.parametrize(
    "fault",
    [
        one_frame,
        seeing_its_neighbour,
        lambda rows: {**rows, "rope_positions": rows["rope_positions"].flip(0).contiguous()},
        lambda rows: {**rows, "pos_embed_rows": rows["pos_embed_rows"].flip(0).contiguous()},
        lambda rows: {
            **rows,
            "pos_embed_weights": torch.full_like(rows["pos_embed_weights"], 0.25),
        },
    ],
    ids=[
        "one frame",
        "a neighbour seen",
        "row and column swapped",
        "corners swapped",
        "corners unweighted",
    ],
)
def test_vision_planted_fault_in_the_rows_is_caught(target: Target, fault: Any) -> None:
    rows = rows_of(target.spec, IMAGES_AND_VIDEO)
    assert error(target, rows) < FLOAT32_TOLERANCE
    assert error(target, fault(rows)) > FAULT_FLOOR


@pytest.mark.parametrize(
    "changes",
    [{"hidden_act": "silu"}, {"level_blocks": (1, 0)}, {"num_heads": 1}],
    ids=["activation", "levels swapped", "heads"],
)
def test_vision_planted_fault_in_the_spec_is_caught(
    target: Target, changes: dict[str, Any]
) -> None:
    wrong = dataclasses.replace(
        target.spec, vision=dataclasses.replace(target.spec.vision, **changes)
    )
    rows = rows_of(target.spec, IMAGES_AND_VIDEO)
    assert error(target, rows, wrong) > FAULT_FLOOR


def test_vision_inputs_are_those_it_lists(target: Target) -> None:
    model = vision_graph(target.spec, "float32", file_name)
    assert {i.name for i in model.graph.input} == set(VISION_INPUTS)
    assert {*rows_of(target.spec, IMAGES_AND_VIDEO), "patches"} == set(VISION_INPUTS)


def test_vision_refuses_an_unknown_activation(target: Target) -> None:
    vision = dataclasses.replace(target.spec.vision, hidden_act="relu")
    with pytest.raises(
        UserError, match="hidden_act: expected gelu, gelu_pytorch_tanh or silu, got 'relu'"
    ):
        vision_graph(dataclasses.replace(target.spec, vision=vision), "float32", file_name)
