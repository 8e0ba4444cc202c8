"""Patches equal to transformers': images against its Pillow processor, videos against recorded values."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from tests.multimodal.conftest import GOLDENS
from tests.multimodal.record_goldens import pattern
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.patches import image_patches, video_patches
from trt_eagle3.multimodal.pixel_config import PixelConfig
from trt_eagle3.multimodal.video import frame_indices

CONFIG = PixelConfig(16, 2, 2, 1024, 16384, (0.5,) * 3, (0.5,) * 3, 1 / 255, 3)
CLIP = replace(CONFIG, mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
RECORD = json.loads((GOLDENS / "goldens.json").read_text())
ARRAYS = np.load(GOLDENS / "goldens.npz")
VIDEOS = [facts for facts in RECORD["videos"] if "error" not in facts]


def hf_image(image: Image.Image, config: PixelConfig) -> tuple[torch.Tensor, list[int]]:
    processor = Qwen2VLImageProcessorPil(
        patch_size=config.patch_size,
        merge_size=config.merge_size,
        temporal_patch_size=config.temporal_patch_size,
        size={"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels},
        image_mean=list(config.mean),
        image_std=list(config.std),
    )
    out = processor(images=[image], return_tensors="pt")
    return out["pixel_values"], out["image_grid_thw"][0].tolist()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(2, 300), st.sampled_from([CONFIG, CLIP]))
def test_image_patches_equal_hf(height: int, width: int, config: PixelConfig) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    image = Image.fromarray(pattern(height, 1, height, width)[0])
    patches, grid = image_patches(image, config)
    expected, expected_grid = hf_image(image, config)
    assert list(grid) == expected_grid
    assert patches.dtype == torch.float32
    assert torch.equal(patches, expected)


def test_transposed_image_would_be_noticed() -> None:
    image = Image.fromarray(pattern(5, 1, 96, 96)[0])
    expected, _ = hf_image(image, CONFIG)
    swapped, _ = image_patches(image.transpose(Image.Transpose.TRANSPOSE), CONFIG)
    assert swapped.shape == expected.shape
    assert not torch.equal(swapped, expected)


def frames_of(facts: dict[str, Any], config: PixelConfig) -> torch.Tensor:
    frames = pattern(facts["seed"], facts["frames"], facts["height"], facts["width"])
    if facts["sample"]:
        frames = frames[frame_indices(facts["frames"], facts["fps"], config)]
    return torch.from_numpy(frames)


def sha256(patches: torch.Tensor) -> str:
    return hashlib.sha256(patches.numpy().tobytes()).hexdigest()


def config_of(facts: dict[str, Any]) -> PixelConfig:
    return replace(CONFIG, min_pixels=facts["size"]["shortest_edge"], max_pixels=facts["size"]["longest_edge"])


@pytest.mark.parametrize("facts", VIDEOS, ids=lambda facts: facts["name"])
def test_video_patches_equal_the_recorded_ones(facts: dict[str, Any]) -> None:
    name, config = facts["name"], config_of(facts)
    patches, grid = video_patches(frames_of(facts, config), config)
    assert [list(grid)] == ARRAYS[f"{name}.video_grid_thw"].tolist()
    if f"{name}.codes" in ARRAYS:
        expected = ARRAYS[f"{name}.table"][ARRAYS[f"{name}.codes"]]
        assert np.abs(patches.numpy() - expected).max() == 0
    assert sha256(patches) == facts["pixels_sha256"]


def test_resize_without_antialias_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = next(facts for facts in VIDEOS if facts["name"] == "five_frames_down")
    plain = torch.nn.functional.interpolate
    monkeypatch.setattr(
        torch.nn.functional,
        "interpolate",
        lambda pixels, **options: plain(pixels.float(), **(options | {"antialias": False})).round().clamp(0, 255),
    )
    patches, _ = video_patches(frames_of(facts, config_of(facts)), config_of(facts))
    assert sha256(patches) != facts["pixels_sha256"]


def test_single_frame_is_refused_where_hf_refuses_it() -> None:
    facts = next(facts for facts in RECORD["videos"] if facts["name"] == "one_frame")
    assert "must be larger than temporal_factor" in facts["error"]
    with pytest.raises(UserError, match="at least 2 frames, got 1"):
        video_patches(frames_of(facts, CONFIG), CONFIG)


def test_odd_frame_count_repeats_the_last_frame() -> None:
    frames = torch.from_numpy(pattern(1, 3, 64, 64))
    odd, grid = video_patches(frames, CONFIG)
    even, _ = video_patches(torch.cat((frames, frames[-1:])), CONFIG)
    assert grid[0] == 2
    assert torch.equal(odd, even)


def test_unknown_filter_is_refused() -> None:
    with pytest.raises(UserError, match="resample: expected 2 or 3, got 1"):
        video_patches(torch.from_numpy(pattern(1, 2, 50, 50)), replace(CONFIG, resample=1))
