"""Patches equal to transformers': images against its Pillow processor, videos against recorded
values.
"""

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
from trt_eagle3.multimodal import MediaPolicy, resize
from trt_eagle3.multimodal import prepared as prepared_module
from trt_eagle3.multimodal.fit import fit_image, fit_video
from trt_eagle3.multimodal.patches import image_patches
from trt_eagle3.multimodal.pixel_config import PixelConfig
from trt_eagle3.multimodal.prepared import PixelPatches, image_table, normalise
from trt_eagle3.multimodal.video_file import frame_indices
from trt_eagle3.multimodal.video_patches import video_patches

CONFIG = PixelConfig(16, 2, 2, 1024, 16384, (0.5,) * 3, (0.5,) * 3, 1 / 255, 3)
CLIP = replace(
    CONFIG, mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711)
)
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


def prepared(image: Image.Image, config: PixelConfig) -> PixelPatches:
    pixels, grid = image_patches(image, config)
    return PixelPatches(
        torch.from_numpy(pixels), image_table(config), grid, config.temporal_patch_size
    )


def reference_patches(frames: torch.Tensor, config: PixelConfig) -> torch.Tensor:
    """float32 [F, C, H, W] -> [N, D]: floats are normalised first and then cut, as transformers
    does.
    """
    patch, m, temporal = config.patch_size, config.merge_size, config.temporal_patch_size
    t, h, w = len(frames) // temporal, frames.shape[2] // patch, frames.shape[3] // patch
    blocks = frames.reshape(t, temporal, 3, h // m, m, patch, w // m, m, patch)
    return blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1)


def reference_image(image: Image.Image, config: PixelConfig) -> torch.Tensor:
    height, width = fit_image("image", image.height, image.width, config)
    resized = np.asarray(image.resize((width, height), resample=Image.Resampling(config.resample)))
    pixels = (resized.astype(np.float64) * config.rescale_factor).astype(np.float32)
    values = (pixels - np.array(config.mean, dtype=np.float32)) / np.array(
        config.std, dtype=np.float32
    )
    frame = torch.from_numpy(values).permute(2, 0, 1)[None]
    return reference_patches(frame.expand(config.temporal_patch_size, -1, -1, -1), config)


def reference_video(frames: torch.Tensor, config: PixelConfig) -> torch.Tensor:
    """All frames at once, as floats."""
    size = fit_video("video", len(frames), *frames.shape[1:3], config)
    pixels = torch.nn.functional.interpolate(
        frames.permute(0, 3, 1, 2).contiguous(),
        size=size,
        mode="bicubic",
        align_corners=False,
        antialias=True,
    )
    mean, std = (
        (torch.tensor(values) * (1.0 / config.rescale_factor)).view(-1, 1, 1)
        for values in (config.mean, config.std)
    )
    values = pixels.to(torch.float32).sub_(mean).div_(std)
    missing = -len(frames) % config.temporal_patch_size
    return reference_patches(torch.cat([values, values[-1:].expand(missing, -1, -1, -1)]), config)


SIDES = st.integers(2, 300)
CONFIGS = st.sampled_from(
    [CONFIG, CLIP, replace(CLIP, patch_size=14), replace(CLIP, resample=2, temporal_patch_size=3)]
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), SIDES, st.sampled_from([CONFIG, CLIP]))
def test_image_patches_equal_hf(height: int, width: int, config: PixelConfig) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    image = Image.fromarray(pattern(height, 1, height, width)[0])
    found = prepared(image, config)
    expected, expected_grid = hf_image(image, config)
    assert list(found.grid) == expected_grid
    assert found.pixels.dtype == torch.uint8
    assert torch.equal(normalise([found]), expected)


@settings(max_examples=30, deadline=None)
@given(SIDES, SIDES, CONFIGS)
def test_image_patches_equal_the_float_path_in_every_dtype(
    height: int, width: int, config: PixelConfig
) -> None:
    image = Image.fromarray(pattern(height, 1, height, width)[0])
    expected = reference_image(image, config)
    for dtype in DTYPES:
        assert torch.equal(normalise([prepared(image, config)], dtype), expected.to(dtype))


@settings(max_examples=20, deadline=None)
@given(
    st.integers(2, 7),
    SIDES,
    SIDES,
    st.sampled_from([CONFIG, CLIP, replace(CLIP, temporal_patch_size=3)]),
)
def test_video_patches_equal_the_float_path_in_every_dtype(
    count: int, height: int, width: int, config: PixelConfig
) -> None:
    if count < config.temporal_patch_size:
        return
    frames = pattern(height, count, height, width)
    expected = reference_video(torch.from_numpy(frames), config)
    found = video_patches(frames, count, config)
    for dtype in DTYPES:
        assert torch.equal(normalise([found], dtype), expected.to(dtype))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_device_looks_up_the_same_numbers(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's way; its operations run on the CPU as well."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    monkeypatch.setattr(prepared_module, "_DEVICE_BLOCK", 7)
    frames = pattern(6, 4, 64, 96)
    for found in (prepared(Image.fromarray(frames[0]), CLIP), video_patches(frames, 4, CLIP)):
        shape = (len(found.pixels), 3, found.temporal_patch_size, found.pixels.shape[3])
        out = torch.empty(shape, dtype=dtype, device=device)
        prepared_module._look_up_on_device(found.pixels, found.table.to(dtype), out)
        assert torch.equal(out.flatten(1).cpu(), normalise([found], dtype))
        if device == "cuda":
            assert torch.equal(
                normalise([found.pinned()], dtype, device).cpu(), normalise([found], dtype)
            )


@pytest.mark.parametrize("cores", [2, 12])
@pytest.mark.parametrize(
    ("height", "width"), [(1100, 1000), (1088, 1000), (1100, 992), (1088, 992)]
)
def test_large_image_is_cut_by_threads_to_the_same_patches(
    height: int, width: int, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resize, "_num_threads", lambda: cores)
    monkeypatch.setattr(resize, "_VERY_LARGE", 0)
    image = Image.fromarray(pattern(5, 1, height, width)[0])
    config = replace(CLIP, max_pixels=1 << 22)
    assert torch.equal(normalise([prepared(image, config)]), reference_image(image, config))


def test_images_and_a_video_are_normalised_each_by_its_own_table() -> None:
    image, frames = Image.fromarray(pattern(5, 1, 96, 64)[0]), pattern(6, 4, 64, 64)
    visuals = [prepared(image, CLIP), video_patches(frames, 4, CONFIG), prepared(image, CONFIG)]
    expected = [
        reference_image(image, CLIP),
        reference_video(torch.from_numpy(frames), CONFIG),
        reference_image(image, CONFIG),
    ]
    assert torch.equal(normalise(visuals), torch.cat(expected))


@pytest.mark.parametrize("at", ["first", "last", "order of pieces", "grid", "table"])
def test_digest_of_several_pieces_changes_with_everything(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_module, "_PIECE_BYTES", 10_000)
    image = Image.fromarray(pattern(5, 1, 128, 96)[0])
    found, pixels = prepared(image, CLIP), prepared(image, CLIP).pixels
    assert pixels.nbytes > 20_000
    assert replace(found, pixels=pixels.clone()).digest == found.digest
    flat = pixels.view(-1)
    match at:
        case "first":
            flat[0] ^= 1
        case "last":
            flat[-1] ^= 1
        case "order of pieces":
            flat[:20_000] = torch.cat((flat[10_000:20_000], flat[:10_000]))
        case "grid":
            found = replace(found, grid=(1, found.grid[2], found.grid[1]))
        case "table":
            found = replace(found, table=found.table.flip(0))
    assert replace(found, pixels=pixels).digest != prepared(image, CLIP).digest


@pytest.mark.parametrize(
    "fault", ["channels swapped in the table", "patches in rows", "frame of another patch"]
)
def test_planted_fault_of_preparation_is_noticed(fault: str) -> None:
    image = Image.fromarray(pattern(5, 1, 128, 96)[0])
    found, expected = prepared(image, CLIP), reference_image(image, CLIP)
    rows, columns = found.grid[1:]
    by_rows = (
        torch.arange(rows * columns)
        .view(rows // 2, columns // 2, 2, 2)
        .permute(0, 2, 1, 3)
        .flatten()
    )
    wrong = {
        "channels swapped in the table": replace(found, table=found.table[[1, 0, 2]]),
        "patches in rows": replace(found, pixels=found.pixels[by_rows]),
        "frame of another patch": replace(found, pixels=found.pixels.roll(1, 0)),
    }[fault]
    assert torch.equal(normalise([found]), expected)
    assert not torch.equal(normalise([wrong]), expected)


def test_transposed_image_would_be_noticed() -> None:
    image = Image.fromarray(pattern(5, 1, 96, 96)[0])
    expected, _ = hf_image(image, CONFIG)
    swapped = normalise([prepared(image.transpose(Image.Transpose.TRANSPOSE), CONFIG)])
    assert swapped.shape == expected.shape
    assert not torch.equal(swapped, expected)


def frames_of(facts: dict[str, Any], config: PixelConfig) -> torch.Tensor:
    frames = pattern(facts["seed"], facts["frames"], facts["height"], facts["width"])
    if facts["sample"]:
        frames = frames[frame_indices(facts["frames"], facts["fps"], config)]
    return torch.from_numpy(frames)


def video(frames: torch.Tensor, config: PixelConfig) -> PixelPatches:
    return video_patches(frames.numpy(), len(frames), config)


def sha256(patches: torch.Tensor) -> str:
    return hashlib.sha256(patches.numpy().tobytes()).hexdigest()


def config_of(facts: dict[str, Any]) -> PixelConfig:
    return replace(
        CONFIG, min_pixels=facts["size"]["shortest_edge"], max_pixels=facts["size"]["longest_edge"]
    )


@pytest.mark.parametrize("facts", VIDEOS, ids=lambda facts: facts["name"])
def test_video_patches_equal_the_recorded_ones(facts: dict[str, Any]) -> None:
    name, config = facts["name"], config_of(facts)
    found = video(frames_of(facts, config), config)
    patches = normalise([found])
    assert [list(found.grid)] == ARRAYS[f"{name}.video_grid_thw"].tolist()
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
        lambda pixels, **options: (
            plain(pixels.float(), **(options | {"antialias": False})).round().clamp(0, 255).byte()
        ),
    )
    patches = normalise([video(frames_of(facts, config_of(facts)), config_of(facts))])
    assert sha256(patches) != facts["pixels_sha256"]


def test_single_frame_is_refused_where_hf_refuses_it() -> None:
    facts = next(facts for facts in RECORD["videos"] if facts["name"] == "one_frame")
    assert "must be larger than temporal_factor" in facts["error"]
    with pytest.raises(UserError, match="at least 2 frames, got 1"):
        video(frames_of(facts, CONFIG), CONFIG)


def test_odd_frame_count_repeats_the_last_frame() -> None:
    frames = torch.from_numpy(pattern(1, 3, 64, 64))
    odd, even = video(frames, CONFIG), video(torch.cat((frames, frames[-1:])), CONFIG)
    assert odd.grid[0] == 2
    assert torch.equal(odd.pixels, even.pixels)


@pytest.mark.parametrize("config", [CONFIG, CLIP, replace(CLIP, patch_size=14)])
def test_image_of_one_pixel_equals_hf(config: PixelConfig) -> None:
    image = Image.new("RGB", (1, 1), (200, 30, 90))
    found = prepared(image, config)
    expected, expected_grid = hf_image(image, config)
    assert list(found.grid) == expected_grid
    assert torch.equal(normalise([found]), expected)


def test_image_is_not_enlarged_beyond_the_policy() -> None:
    """Without any work: so large an array could not be made."""
    huge = replace(CONFIG, min_pixels=10**14, max_pixels=10**14)
    with pytest.raises(
        UserError, match=r"x: \d+x\d+ pixels after resizing, the limit is 268435456"
    ):
        image_patches(Image.new("RGB", (9, 9)), huge, "x")
    served = MediaPolicy(paths=False, max_pixels=1 << 25, max_video_pixels=1 << 31)
    with pytest.raises(UserError, match="after resizing, the limit is 33554432 in all"):
        image_patches(Image.new("RGB", (9, 9)), huge, "x", served)
    with pytest.raises(UserError, match="after resizing, the limit is 33554432 in all"):
        video_patches(pattern(1, 2, 9, 9), 2, huge, "x", served)
    many = replace(CONFIG, min_pixels=1 << 24, max_pixels=1 << 24, per_frame=True)
    with pytest.raises(UserError, match="200 frames of 4096x4096 pixels after resizing"):
        video_patches(pattern(1, 2, 9, 9), 200, many, "x", served)


def test_small_image_is_enlarged_whatever_the_policy() -> None:
    strict = MediaPolicy(paths=False, max_pixels=4096)
    wide = replace(CONFIG, min_pixels=65536, max_pixels=65536)
    _, grid = image_patches(Image.new("RGB", (64, 64)), wide, "x", strict)
    assert grid == (1, 16, 16)


def test_unknown_filter_is_refused() -> None:
    with pytest.raises(UserError, match="resample: expected 2 or 3, got 1"):
        video_patches(pattern(1, 2, 50, 50), 2, replace(CONFIG, resample=1))
