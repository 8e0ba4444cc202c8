"""Resized sizes against transformers' two smart_resize functions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as hf_fit_image

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.fit import fit_image, fit_video
from trt_eagle3.multimodal.pixel_config import PixelConfig

CONFIG = PixelConfig(16, 2, 2, 4096, 65536, (0.5,) * 3, (0.5,) * 3, 1 / 255, 3)
sides = st.integers(1, 3000)


def hf_fit_video(frames: int, height: int, width: int, config: PixelConfig) -> tuple[int, int]:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    limits = {"min_pixels": config.min_pixels, "max_pixels": config.max_pixels}
    return smart_resize(frames, height, width, config.temporal_patch_size, config.factor, **limits)


@settings(deadline=None)
@given(sides, sides)
def test_image_size_equals_hf(height: int, width: int) -> None:
    try:
        expected = hf_fit_image(height, width, CONFIG.factor, CONFIG.min_pixels, CONFIG.max_pixels)
    except ValueError:
        with pytest.raises(UserError, match="aspect ratio"):
            fit_image("image", height, width, CONFIG)
    else:
        assert fit_image("image", height, width, CONFIG) == expected


@settings(deadline=None)
@given(st.integers(1, 40), sides, sides)
@example(2, 100, 100)  # between the bounds: such small ones are seldom drawn
@example(3, 96, 130)
@example(5, 64, 64)
@example(4, 128, 128)  # at the upper bound
def test_video_size_equals_hf(frames: int, height: int, width: int) -> None:
    try:
        expected = hf_fit_video(frames, height, width, CONFIG)
    except ValueError:
        with pytest.raises(UserError, match=r"aspect ratio|at least 2 frames"):
            fit_video("video", frames, height, width, CONFIG)
    else:
        assert fit_video("video", frames, height, width, CONFIG) == expected


def test_width_before_height_would_be_noticed() -> None:
    assert fit_image("image", 300, 900, CONFIG) != fit_image("image", 900, 300, CONFIG)


def test_capped_frame_stays_under_its_tokens() -> None:
    capped = replace(CONFIG, max_pixels=10**8, max_frame_tokens=6)
    height, width = fit_video("video", 4, 1000, 1000, capped)
    assert height * width // capped.factor**2 <= 6
    assert fit_video("video", 4, 1000, 1000, replace(capped, max_frame_tokens=None)) == (992, 992)


@pytest.mark.parametrize(
    ("frames", "size", "tokens", "most", "expected"),
    [
        (4, (1000, 1500), 6, 10**8, (64, 96)),
        (8, (1000, 1000), 100, 8 * 5120, (64, 64)),  # what all frames may have is less
        (4, (1000, 1000), 1, 10**8, (64, 64)),  # never under the lower bound
        (4, (64, 96), 100, 10**8, (64, 96)),
    ],
)
def test_capped_frame_is_as_large_as_its_tokens_let_it(
    frames: int, size: tuple[int, int], tokens: int, most: int, expected: tuple[int, int]
) -> None:
    assert (
        fit_video("video", frames, *size, replace(CONFIG, max_pixels=most, max_frame_tokens=tokens))
        == expected
    )


@pytest.mark.parametrize(("height", "width"), [(1, 201), (402, 2)])
def test_useless_image_is_refused_by_name(height: int, width: int) -> None:
    with pytest.raises(UserError, match=r"^cat\.png: expected") as caught:
        fit_image("cat.png", height, width, CONFIG)
    assert "\n" not in str(caught.value)
