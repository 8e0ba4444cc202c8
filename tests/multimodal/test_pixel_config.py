"""Processor configs in each place where checkpoints keep them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.multimodal.conftest import IMAGE_CONFIG, VIDEO_CONFIG, TinyVision
from trt_eagle3.errors import UserError
from trt_eagle3.families.qwen3_vl.prompt import VIDEO_DEFAULTS
from trt_eagle3.multimodal.pixel_config import (
    PixelConfig,
    read_image_config,
    read_video_config,
)

VISION = TinyVision()


def video_config(directory: Path) -> PixelConfig:
    return read_video_config(directory, VISION, VIDEO_DEFAULTS, "max_frame_tokens")


def write(directory: Path, name: str, value: Any) -> Path:
    (directory / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return directory


def test_published_files_give_their_sizes(published: Path) -> None:
    image, video = read_image_config(published, VISION), video_config(published)
    assert (image.min_pixels, image.max_pixels, image.factor) == (1024, 16384, 32)
    assert (video.min_pixels, video.max_pixels) == (4096, 16384)
    assert (video.fps, video.min_frames, video.max_frames) == (2.0, 4, 768)


def test_nested_config_wins_over_the_flat_files(tmp_path: Path) -> None:
    nested = {
        "image_processor": IMAGE_CONFIG | {"resample": 2},
        "video_processor": VIDEO_CONFIG | {"fps": 1},
    }
    write(tmp_path, "processor_config.json", nested)
    write(tmp_path, "preprocessor_config.json", IMAGE_CONFIG)
    assert read_image_config(tmp_path, VISION).resample == 2
    assert video_config(tmp_path).fps == 1.0


def test_old_pixel_names_override_size(tmp_path: Path) -> None:
    write(
        tmp_path,
        "preprocessor_config.json",
        IMAGE_CONFIG | {"min_pixels": 2048, "max_pixels": 4096},
    )
    config = read_image_config(tmp_path, VISION)
    assert (config.min_pixels, config.max_pixels) == (2048, 4096)


def test_video_falls_back_on_the_image_file(tmp_path: Path) -> None:
    write(tmp_path, "preprocessor_config.json", IMAGE_CONFIG)
    assert video_config(tmp_path).max_pixels == 16384


def test_capped_frames_carry_their_token_limit(tmp_path: Path) -> None:
    write(tmp_path, "video_preprocessor_config.json", VIDEO_CONFIG | {"cap_pixels_per_frame": True})
    assert video_config(tmp_path).max_frame_tokens == 768


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ("[" * 100000, "nested deeper than"),
        (IMAGE_CONFIG | {"size": 7}, "size: expected shortest_edge and longest_edge, got 7"),
        (
            IMAGE_CONFIG | {"size": {"shortest_edge": 2**31 - 1, "longest_edge": 2**31 - 1}},
            "size.shortest_edge: expected at most 67108864 pixels, got 2147483647: every image",
        ),
        (IMAGE_CONFIG | {"min_pixels": 1e12}, "size.shortest_edge: expected a number"),
        (
            IMAGE_CONFIG | {"size": {"shortest_edge": [1], "longest_edge": 9}},
            "size.shortest_edge: expected a number",
        ),
        (
            IMAGE_CONFIG | {"size": {"shortest_edge": 1e300, "longest_edge": 9}},
            "size.shortest_edge: expected a number",
        ),
        (IMAGE_CONFIG | {"image_mean": 0.5}, "image_mean: expected 3 numbers, got 0.5"),
        (IMAGE_CONFIG | {"image_std": [0.5, 0.5]}, "image_std: expected 3 numbers"),
        (
            IMAGE_CONFIG | {"rescale_factor": "x"},
            "rescale_factor: expected a number above 0, got 'x'",
        ),
        (IMAGE_CONFIG | {"resample": 9}, "resample: expected 0 to 5, got 9"),
        (IMAGE_CONFIG | {"patch_size": 14}, "patch_size: expected 16 as in config.json, got 14"),
        (IMAGE_CONFIG | {"do_resize": False}, "do_resize: expected true"),
        (
            IMAGE_CONFIG | {"size": {"height": 3, "width": 3}},
            "expected shortest_edge and longest_edge",
        ),
    ],
)
def test_wrong_file_is_refused_in_one_line(tmp_path: Path, content: Any, expected: str) -> None:
    write(tmp_path, "preprocessor_config.json", content)
    with pytest.raises(UserError, match=r"preprocessor_config\.json") as caught:
        read_image_config(tmp_path, VISION)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no preprocessor_config\.json"):
        read_image_config(tmp_path, VISION)
