"""The vision graph against transformers on random towers and grids."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.vision_utils import get_vision_window_index

from tests.families.qwen2_5_vl.random_pair import save_qwen25
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.engine.bundle.record import REFERENCE_ROOT, reference_location
from trt_eagle3.engine.runtime.session import open_session
from trt_eagle3.families.qwen2_5_vl.vision_graph import vision_graph
from trt_eagle3.families.qwen2_5_vl.vision_rows import VISION_INPUTS, padded_rows, window_rows
from trt_eagle3.families.registry import read_target, tower_of
from trt_eagle3.parity.metrics import relative_error

GRIDS = [[1, 8, 10], [3, 4, 6], [1, 14, 2]]


@torch.no_grad()
def both(
    folder: Path, model: Any, grids: list[list[int]], backend: str, rows: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """What the graph makes of random patches, and what transformers does."""
    spec = read_target(folder)
    patches = patches_of(spec, grids)
    given_rows = rows or tower_of(spec).inputs(spec.require_vision(), torch.tensor(grids))
    file = folder / "vision.onnx"
    file.write_bytes(vision_graph(spec, "float32", reference_location).SerializeToString())
    session = open_session(backend, file, REFERENCE_ROOT)
    found = session.run({"patches": patches, **given_rows})["visual_embeds"]
    expected = model.model.visual(patches, grid_thw=torch.tensor(grids)).pooler_output
    return found, expected


def patches_of(spec: TargetCheckpoint, grids: list[list[int]]) -> Tensor:
    count = sum(t * h * w for t, h, w in grids)
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, spec.require_vision().patch_dim, generator=generator)


@st.composite
def towers(draw: st.DrawFn) -> dict[str, Any]:
    depth, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    merge, patch = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 3))
    return {
        "depth": depth,
        "num_heads": heads,
        "hidden_size": heads * 4 * draw(st.integers(1, 4)),
        "intermediate_size": draw(st.sampled_from([9, 24])),
        "patch_size": patch,
        "temporal_patch_size": draw(st.integers(1, 2)),
        "spatial_merge_size": merge,
        "window_size": merge * patch * draw(st.integers(1, 4)),
        "fullatt_block_indexes": draw(st.lists(st.integers(0, depth - 1), unique=True)),
    }


@settings(max_examples=12)
@given(
    tower=towers(),
    cells=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=3
    ),
    backend=st.sampled_from(["onnxruntime", "torch"]),
)
def test_any_tower_and_grids_equal_transformers(
    tower: dict[str, Any], cells: list[tuple[int, int, int]], backend: str
) -> None:
    merge = tower["spatial_merge_size"]
    grids = [[t, h * merge, w * merge] for t, h, w in cells]
    with tempfile.TemporaryDirectory() as name:
        model = save_qwen25(Path(name), vision=tower)
        found, expected = both(Path(name), model, grids, backend, {})
    assert relative_error(found, expected) < FLOAT32_TOLERANCE


@settings(max_examples=60)
@given(
    cells=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4
    ),
    side=st.integers(1, 4),
)
def test_rows_follow_transformers_windows(cells: list[tuple[int, int, int]], side: int) -> None:
    grids = torch.tensor([[t, 2 * h, 2 * w] for t, h, w in cells])
    index, starts = get_vision_window_index(grids, 2, side * 2 * 14, 14)
    rows = window_rows(grids, 2, side)
    expected = (index[:, None] * 4 + torch.arange(4)).flatten()
    assert torch.equal(rows["window_rows"].long(), expected)
    assert torch.equal(rows["token_rows"].long(), index.argsort())
    assert torch.equal(rows["window_starts"], starts.int())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tower")
    return folder, save_qwen25(folder, vision={"depth": 2, "fullatt_block_indexes": [0]})


def rows_of(folder: Path) -> dict[str, Tensor]:
    spec = read_target(folder)
    return tower_of(spec).inputs(spec.require_vision(), torch.tensor(GRIDS))


FAULTS: dict[str, Any] = {
    "order of windows not undone": lambda r: {"token_rows": torch.arange(len(r["token_rows"]))},
    "undone the wrong way": lambda r: {"token_rows": r["token_rows"].argsort()},
    "windows are frames": lambda r: {"window_starts": r["frame_starts"]},
    "frames are windows": lambda r: {"frame_starts": r["window_starts"]},
    "rows and columns swapped": lambda r: {"rope_positions": r["rope_positions"].flip(0)},
    "positions in the order of patches": lambda r: {
        "rope_positions": r["rope_positions"][:, r["window_rows"].long().argsort()]
    },
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_in_the_rows_is_caught(name: str, target: tuple[Path, Any]) -> None:
    rows = rows_of(target[0])
    wrong = {key: value.int().contiguous() for key, value in FAULTS[name](rows).items()}
    found, expected = both(*target, GRIDS, "torch", {**rows, **wrong})
    assert relative_error(found, expected) > FAULT_FLOOR


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_padding_changes_nothing(backend: str, target: tuple[Path, Any]) -> None:
    folder, model = target
    spec, rows = read_target(folder), rows_of(folder)
    count = len(rows["window_rows"])
    padded = padded_rows(rows, count + 24)
    patches = torch.nn.functional.pad(patches_of(spec, GRIDS), (0, 0, 0, 24))
    file = folder / "padded.onnx"
    file.write_bytes(vision_graph(spec, "float32", reference_location).SerializeToString())
    session = open_session(backend, file, REFERENCE_ROOT)
    found = session.run({"patches": patches, **padded})["visual_embeds"][: count // 4]
    _, expected = both(folder, model, GRIDS, "torch", {})
    assert relative_error(found, expected) < FLOAT32_TOLERANCE
    assert len(padded["frame_starts"]) == len(padded_rows(rows, count + 48)["frame_starts"]) == 9


def test_inputs_are_those_it_lists(target: tuple[Path, Any]) -> None:
    spec = read_target(target[0])
    model = vision_graph(spec, "float32", reference_location)
    assert {i.name for i in model.graph.input} == set(VISION_INPUTS)
    dims = {d.dim_param for i in model.graph.input for d in i.type.tensor_type.shape.dim}
    ranges = tower_of(spec).ranges(spec.require_vision(), 256)
    assert dims - {""} == ranges.keys()
    assert all(low <= usual <= most for low, usual, most in ranges.values())
