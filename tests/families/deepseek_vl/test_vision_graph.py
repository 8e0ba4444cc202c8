"""The vision graphs and the squares that they are given, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from transformers import DeepseekVLHybridImageProcessorPil, DeepseekVLImageProcessorPil

from tests.families.deepseek_vl.random_pair import FAMILIES, HYBRID, save_deepseek
from tests.multimodal.record_goldens import pattern
from tests.reference.compare import FLOAT32_TOLERANCE
from trt_eagle3.engine.bundle.record import REFERENCE_ROOT, reference_location
from trt_eagle3.engine.runtime.session import open_session
from trt_eagle3.families.deepseek_vl.vision_rows import VISION_INPUTS
from trt_eagle3.families.registry import family_of, read_target, tower_of
from trt_eagle3.graph.ops import DOMAIN
from trt_eagle3.graph.trt_export import trt_export
from trt_eagle3.multimodal.media_job import MediaJob, run_job
from trt_eagle3.multimodal.policy import LOCAL_MEDIA
from trt_eagle3.parity.metrics import relative_error
from trt_eagle3.parity.reference.target import load_reference

TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "one tower": ("deepseek_vl", {"siglip": {"num_hidden_layers": 1, "hidden_act": "gelu"}}),
    "pooling head": ("deepseek_vl", {"siglip": {"vision_use_head": True}}),
    "windows with a rest": (HYBRID, {}),
    "windows that fit, no biases, one head": (
        HYBRID,
        {"sam": {"window_size": 4, "qkv_bias": False, "num_attention_heads": 1}},
    ),
    "the whole square in the last block": (
        HYBRID,
        {"sam": {"global_attn_indexes": [1], "num_hidden_layers": 2}},
    ),
    "no windows, equal patches": (
        HYBRID,
        {"sam": {"window_size": 0, "patch_size": 4, "image_size": 48, "mlp_dim": None}},
    ),
    "no positions, a small square": (
        HYBRID,
        {"sam": {"use_abs_pos": False, "use_rel_pos": False, "patch_size": 4, "image_size": 20}},
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("deepseek")
    for family in FAMILIES:
        save_deepseek(root / family, family)
    return {family: root / family for family in FAMILIES}


@pytest.mark.parametrize("name", TOWERS)
@torch.no_grad()
def test_graph_and_reference_equal_transformers(name: str, tmp_path: Path) -> None:
    family, sections = TOWERS[name]
    model: Any = save_deepseek(tmp_path, family, **sections)
    spec = read_target(tmp_path)
    vision, tower = spec.require_vision(), tower_of(spec)
    grids = torch.tensor([[1, 6, 6]] * 2)
    patches = torch.randn(72, vision.patch_dim, generator=torch.Generator().manual_seed(0))
    reference: Any = load_reference(spec, torch.float32, "cpu")
    found = model.model.get_image_features(*reference.pixels(patches), return_dict=True)
    expected = found.pooler_output.flatten(0, 1)
    assert relative_error(reference.vision(patches, grids).visual_embeds, expected) == 0
    file = tmp_path / "vision.onnx"
    file.write_bytes(tower.graph(spec, "float32", reference_location).SerializeToString())
    for backend in ("onnxruntime", "torch"):
        session = open_session(backend, file, REFERENCE_ROOT)
        rows = tower.inputs(vision, grids)
        ours = session.run({"patches": patches, **rows})["visual_embeds"]
        assert relative_error(ours, expected) < FLOAT32_TOLERANCE, backend


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_graph_in_16_bits_is_as_near_as_transformers(
    dtype: torch.dtype, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    spec = read_target(checkpoints[HYBRID])
    vision, tower = spec.require_vision(), tower_of(spec)
    grids, patches = torch.tensor([[1, 6, 6]]), torch.randn(36, vision.patch_dim)
    exact, rounded = (
        load_reference(spec, kind, "cpu").vision(patches, grids).visual_embeds.float()
        for kind in (torch.float32, dtype)
    )
    file = tmp_path / "vision.onnx"
    name = str(dtype).removeprefix("torch.")
    file.write_bytes(tower.graph(spec, name, reference_location).SerializeToString())
    session = open_session("torch", file, REFERENCE_ROOT)
    rows = tower.inputs(vision, grids)
    ours = session.run({"patches": patches.to(dtype), **rows})["visual_embeds"].float()
    assert relative_error(ours, exact) < 2 * relative_error(rounded, exact)


@pytest.mark.parametrize("family", FAMILIES)
def test_tower_lists_its_inputs_ranges_and_memory(
    family: str, checkpoints: dict[str, Path]
) -> None:
    spec = read_target(checkpoints[family])
    vision, tower = spec.require_vision(), tower_of(spec)
    model = tower.graph(spec, "float32", reference_location)
    assert {i.name for i in model.graph.input} == set(VISION_INPUTS)
    dims = {d.dim_param for i in model.graph.input for d in i.type.tensor_type.shape.dim}
    assert dims - {""} == tower.ranges(vision, 256).keys()
    visual = [ref for name, ref in spec.tensors.items() if name.startswith("visual.")]
    sizes = tower.sizes(vision)
    assert sizes.num_values == sum(torch.Size(ref.shape).numel() for ref in visual)
    assert sizes.patches_per_unit == 36
    rows = tower.inputs(vision, torch.tensor([[1, 6, 6]]))
    padded = tower.padded(vision, rows, 108)
    assert padded["frame_starts"].tolist() == [0, 36, 72, 108]
    assert padded["rope_positions"].shape == (2, 108)


@pytest.mark.parametrize("family", FAMILIES)
def test_graph_is_exported_in_opset_17(family: str, checkpoints: dict[str, Path]) -> None:
    spec = read_target(checkpoints[family])
    made = trt_export(tower_of(spec).graph(spec, "float16", reference_location)).model
    assert next(o.version for o in made.opset_import if o.domain == "") == 17
    for node in made.graph.node:
        if node.domain != DOMAIN:
            assert onnx.defs.get_schema(node.op_type, 17).since_version <= 17, node.op_type


SIZES = [(24, 24), (70, 50), (400, 31), (1300, 1100), (1, 1), (2, 300)]


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_squares_are_transformers_element_for_element(
    family: str, height: int, width: int, checkpoints: dict[str, Path]
) -> None:
    folder = checkpoints[family]
    spec = read_target(folder)
    image = Image.fromarray(pattern(height + width, 1, height, width)[0])
    ours = family_of(spec).processor(folder, spec).prompt("x", [image])
    kind: Any = DeepseekVLImageProcessorPil
    if family == HYBRID:
        kind = DeepseekVLHybridImageProcessorPil
    theirs = kind.from_pretrained(folder)(image, return_tensors="pt")
    reference: Any = load_reference(spec, torch.float32, "cpu")
    found = reference.pixels(ours.patches)
    keys = ("pixel_values", "high_res_pixel_values")[: len(found)]
    for key, pixels in zip(keys, found, strict=True):
        np.testing.assert_array_equal(pixels.numpy(), theirs[key].numpy(), err_msg=key)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_process_cuts_the_same_squares(
    family: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A job reaches a decoder process as JSON."""
    spec = read_target(checkpoints[family])
    processor = family_of(spec).processor(spec.path, spec)
    file = tmp_path / "image.png"
    Image.fromarray(pattern(1, 1, 30, 50)[0]).save(file)
    config = processor.image_config
    assert config is not None
    job = MediaJob("image", "image", LOCAL_MEDIA, config)
    sent = MediaJob.from_dict(json.loads(json.dumps(job.to_dict())))
    [part] = run_job(sent, file.read_bytes())
    [visual] = processor.prompt("x", [file]).visuals
    np.testing.assert_array_equal(part.array, visual.pixels.numpy())
