"""The vision graph and the tiles that it is given, against transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import GotOcr2ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from tests.families.internvl.random_pair import save_internvl
from tests.multimodal.record_goldens import pattern
from tests.reference.compare import FLOAT32_TOLERANCE
from trt_eagle3.engine.bundle.record import REFERENCE_ROOT, reference_location
from trt_eagle3.engine.runtime.session import open_session
from trt_eagle3.families.internvl.reference import tiles_from_patches
from trt_eagle3.families.internvl.tower import tiles_of
from trt_eagle3.families.internvl.vision_graph import vision_graph
from trt_eagle3.families.internvl.vision_rows import VISION_INPUTS, padded_rows, tile_rows
from trt_eagle3.families.registry import read_target, tower_of
from trt_eagle3.multimodal.patches import image_patches
from trt_eagle3.multimodal.pixel_config import PixelConfig
from trt_eagle3.multimodal.tiles import tile_grid
from trt_eagle3.parity.metrics import relative_error


def config(side: int, least: int, most: int, merge: int = 2, patch: int = 4) -> PixelConfig:
    half = (0.5,) * 3
    return PixelConfig(
        *(patch, 1, merge, 1, 1, half, half, 1 / 255, 3),
        tile_side=side,
        min_tiles=least,
        max_tiles=most,
    )


@st.composite
def towers(draw: st.DrawFn) -> dict[str, Any]:
    heads, patch = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    side = patch * 2 * draw(st.integers(1, 3))
    return {
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": heads,
        "hidden_size": heads * 4 * draw(st.integers(1, 4)),
        "intermediate_size": draw(st.sampled_from([9, 24])),
        "attention_bias": draw(st.booleans()),
        "use_qk_norm": draw(st.booleans()),
        "norm_type": draw(st.sampled_from(["layer_norm", "rms_norm"])),
        "use_mean_pooling": draw(st.booleans()),
        "patch_size": [patch, patch],
        "image_size": [side, side],
    }


@settings(max_examples=12)
@given(tower=towers(), tiles=st.integers(1, 4), backend=st.sampled_from(["onnxruntime", "torch"]))
@torch.no_grad()
def test_any_tower_and_tiles_equal_transformers(
    tower: dict[str, Any], tiles: int, backend: str
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_internvl(folder, vision=tower)
        spec = read_target(folder)
        vision = spec.require_vision()
        side = tiles_of(vision).side
        grids = torch.tensor([[tiles, side, side]])
        patches = torch.randn(tiles * side**2, vision.patch_dim)
        file = folder / "vision.onnx"
        file.write_bytes(vision_graph(spec, "float32", reference_location).SerializeToString())
        rows = tower_of(spec).inputs(vision, grids)
        session = open_session(backend, file, REFERENCE_ROOT)
        found = session.run({"patches": patches, **rows})["visual_embeds"]
        pixels = tiles_from_patches(patches, grids, model.config.vision_config, 2)
        expected = model.model.get_image_features(pixels, return_dict=True).pooler_output
    assert relative_error(found, expected.flatten(0, 1)) < FLOAT32_TOLERANCE


def test_padding_adds_tiles() -> None:
    rows = tile_rows(2, 4, 2)
    padded = padded_rows(rows, 48, 4, 2)
    assert padded["frame_starts"].tolist() == [0, 17, 34, 51]
    for name, value in rows.items():
        assert torch.equal(padded[name][..., : value.shape[-1]], value), name


def test_inputs_are_those_it_lists(tmp_path: Path) -> None:
    save_internvl(tmp_path)
    spec = read_target(tmp_path)
    model = vision_graph(spec, "float32", reference_location)
    assert {i.name for i in model.graph.input} == set(VISION_INPUTS)
    dims = {d.dim_param for i in model.graph.input for d in i.type.tensor_type.shape.dim}
    ranges = tower_of(spec).ranges(spec.require_vision(), 256)
    assert dims - {""} == ranges.keys()
    assert all(low <= usual <= most for low, usual, most in ranges.values())


@settings(max_examples=200)
@given(
    height=st.integers(1, 900),
    width=st.integers(1, 900),
    most=st.integers(1, 12),
    least=st.integers(1, 4),
)
def test_grid_of_tiles_is_transformers(height: int, width: int, most: int, least: int) -> None:
    found = tile_grid(height, width, config(24, min(least, most), most))
    if most > 1:
        theirs = get_optimal_tiled_canvas((height, width), (24, 24), min(least, most), most)
        assert found == theirs
    else:
        assert found == (1, 1)


@pytest.mark.parametrize(
    ("height", "width"), [(24, 24), (70, 50), (25, 160), (400, 31), (33, 34), (1300, 1100)]
)
@pytest.mark.parametrize("most", [1, 4, 12])
def test_tiles_are_transformers_element_for_element(height: int, width: int, most: int) -> None:
    """The last size is resized in parts on several cores."""
    image = Image.fromarray(pattern(height + width, 1, height, width)[0])
    theirs = GotOcr2ImageProcessorPil(
        size={"height": 24, "width": 24}, crop_to_patches=True, min_patches=1, max_patches=most
    )
    expected = theirs(image, do_rescale=False, do_normalize=False, return_tensors="pt")
    pixels, grid = image_patches(image, config(24, 1, most))
    patches = torch.from_numpy(pixels).flatten(1)
    assert grid == (len(expected["pixel_values"]), 6, 6)

    class Vision:
        num_channels, patch_size = 3, (4, 4)

    found = tiles_from_patches(patches, torch.tensor([grid]), Vision, 2)
    np.testing.assert_array_equal(found.numpy(), expected["pixel_values"].numpy())
