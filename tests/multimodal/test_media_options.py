"""Keys of message parts that say how large an image or video is wanted, and when its frames were
taken: transformers' values.
"""

from __future__ import annotations

import base64
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata, read_video_pyav

from tests.multimodal.bombs import encode
from tests.multimodal.conftest import IMAGE_CONFIG
from tests.multimodal.record_goldens import pattern
from tests.multimodal.test_patches import reference_video
from tests.multimodal.test_policy import data_uri
from tests.multimodal.test_video import write_file
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal import MediaPolicy, ModelInputs, Processor, Video, load_video
from trt_eagle3.multimodal.fit import fit_video
from trt_eagle3.multimodal.media_options import MediaOptions
from trt_eagle3.multimodal.pixel_config import PixelConfig
from trt_eagle3.multimodal.video_file import frame_indices

PICTURE = Image.fromarray(pattern(5, 1, 210, 330)[0])
URI = data_uri(encode(PICTURE))
FRAMES = [Image.fromarray(frame) for frame in pattern(6, 6, 96, 128)]
SIZES = {"min_pixels": 30_000, "max_pixels": 40_000}
FACTOR = 32


def see(processor: Processor, *parts: dict[str, Any]) -> ModelInputs:
    return processor.messages(
        [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    )


def hf_image(image: Image.Image = PICTURE, **sizes: int) -> torch.Tensor:
    values = {k: v for k, v in IMAGE_CONFIG.items() if not k.endswith(("_class", "_type"))}
    low, high = IMAGE_CONFIG["size"].values()  # type: ignore[attr-defined]
    values["size"] = {
        "shortest_edge": sizes.get("min_pixels", low),
        "longest_edge": sizes.get("max_pixels", high),
    }
    made = Qwen2VLImageProcessorPil(**values)(images=[image], return_tensors="pt")
    patches: torch.Tensor = made["pixel_values"]
    return patches


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": PICTURE, **SIZES},
        {"type": "image", "image": URI, **SIZES},
        {"type": "image", "url": URI, **SIZES},
        {"type": "image", "base64": base64.b64encode(encode(PICTURE)).decode(), **SIZES},
        {"type": "image_url", "image_url": {"url": URI, **SIZES}},
        {"type": "image_url", "image_url": {"url": URI}, **SIZES},
        {"type": "image_url", "image_url": URI, **SIZES},
        {"type": "image", "image": {"url": URI, "min_pixels": 30_000}, "max_pixels": 40_000.0},
        {"image_url": URI, **SIZES},
        {"type": "input_image", "image_url": URI, **SIZES, "detail": "auto", "uuid": None},
    ],
)
def test_pixels_of_an_image_are_bounded_wherever_the_keys_stand(
    processor: Processor, part: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert torch.equal(see(processor, part).patches, hf_image(**SIZES))
    assert not caplog.records


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_pixels": 5000},
        {"max_pixels": 25_000},
        {"min_pixels": 200_000, "max_pixels": 300_000},
        {"max_pixels": 900},  # under the checkpoint's lower bound, which never enlarges then
    ],
)
def test_one_bound_leaves_the_other_to_the_checkpoint(
    processor: Processor, sizes: dict[str, int]
) -> None:
    found = see(processor, {"type": "image", "image": PICTURE, **sizes}).patches
    assert torch.equal(found, hf_image(**sizes))
    assert not torch.equal(found, see(processor, {"type": "image", "image": PICTURE}).patches)


@pytest.mark.parametrize(("height", "width"), [(64, 96), (70, 100), (31, 64), (400, 600)])
def test_resized_sides_are_what_qwen_vl_utils_resizes_to(
    processor: Processor, height: int, width: int
) -> None:
    low, high = IMAGE_CONFIG["size"].values()  # type: ignore[attr-defined]
    size = smart_resize(height, width, FACTOR, low, high)
    resized = PICTURE.resize(size[::-1], Image.Resampling.BICUBIC)
    part = {"type": "image", "image": PICTURE, "resized_height": height, "resized_width": width}
    assert torch.equal(see(processor, part).patches, hf_image(resized))


def hf_frames(sampled: list[int], fps: float) -> list[str]:
    times = Qwen3VLProcessor._calculate_timestamps(None, sampled, fps, 2)
    return [f"<{second:.1f} seconds>" for second in times]


def shown_times(processor: Processor, part: dict[str, Any]) -> list[str]:
    text = processor.decode(see(processor, part).token_ids.tolist())
    return [
        piece.partition("<")[1] + piece.partition("<")[2] + " seconds>"
        for piece in text.split(" seconds>")[:-1]
    ]


@pytest.mark.parametrize("fps", [0.25, 0.5, 1, 4])
@pytest.mark.parametrize("key", ["sample_fps", "fps"])
def test_list_of_frames_has_the_rate_that_is_said(
    processor: Processor, key: str, fps: float
) -> None:
    expected = hf_frames(list(range(6)), fps)
    uris = [data_uri(encode(frame)) for frame in FRAMES]
    joined = "data:video/jpeg;base64," + ",".join(uri.partition(",")[2] for uri in uris)
    for part in (
        {"type": "video", "video": FRAMES, key: fps},
        {"type": "video", "video": Video(FRAMES), key: fps},
        {"type": "video", "video": uris, key: fps},
        {"type": "video_url", "video_url": {"url": uris, key: fps}},
        {"type": "video_url", "video_url": {"url": joined}, key: fps},
        {"type": "video_url", "video_url": joined, key: fps},
    ):
        assert shown_times(processor, part) == expected
    assert shown_times(processor, {"type": "video", "video": uris}) == hf_frames(list(range(6)), 2)


def test_list_of_frames_has_the_times_that_are_said(processor: Processor) -> None:
    part = {"type": "video", "video": FRAMES, "timestamps": [0, 1, 5, 6.5, 30, 31]}
    assert shown_times(processor, part) == ["<0.5 seconds>", "<5.8 seconds>", "<30.5 seconds>"]


def test_list_of_jpegs_in_one_uri_is_a_list_of_frames(processor: Processor) -> None:
    data = [encode(frame, "JPEG") for frame in FRAMES]
    uri = "data:video/jpeg;base64," + ",".join(base64.b64encode(d).decode() for d in data)
    found = see(processor, {"type": "video_url", "video_url": {"url": uri}})
    expected = see(processor, {"type": "video", "video": data})
    assert torch.equal(found.patches, expected.patches)
    assert torch.equal(found.token_ids, expected.token_ids)
    many = MediaPolicy(paths=False, max_video_frames=5)
    for source in (uri, data):
        with pytest.raises(UserError, match=r"video: 6 frames, the limit is 5\. Send fewer"):
            load_video(source, processor.video_config, policy=many)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_file(tmp_path_factory.mktemp("clip") / "clip.mp4", count=90, rate=15)


def sampled(config: PixelConfig, clip: Path, **values: Any) -> Any:
    options = MediaOptions.read({k: v for k, v in values.items() if v is not None}, "x")
    return load_video(clip, options.of_video(config))


@pytest.mark.parametrize(
    "values",
    [
        {"fps": 1},
        {"fps": 0.1, "min_frames": 3},
        {"fps": 7.5},
        {"fps": 30},
        {"max_frames": 7},
        {"fps": 10, "max_frames": 16},
        {"nframes": 5},
        {"nframes": 90},
    ],
)
def test_frames_of_a_file_are_those_that_transformers_takes(
    processor: Processor, clip: Path, values: dict[str, Any]
) -> None:
    settings = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    for name in ("min_frames", "max_frames"):
        setattr(settings, name, values.get(name, getattr(settings, name)))
    metadata = VideoMetadata(total_num_frames=90, fps=15.0)
    if "nframes" in values:
        settings.fps = None  # a rate and a number exclude each other
    wanted = Qwen3VLVideoProcessor.sample_frames(
        settings, metadata, num_frames=values.get("nframes"), fps=values.get("fps")
    )
    assert processor.video_config is not None
    video = sampled(processor.video_config, clip, **values)
    expected, _ = read_video_pyav(str(clip), lambda **_: wanted)
    np.testing.assert_array_equal(video.frames.numpy(), expected)
    assert video.times == tuple(i / 15.0 for i in wanted)


@pytest.mark.parametrize("count", [2, 5, 6, 7, 45, 90])
def test_whole_patches_of_frames_are_those_of_qwen2_vl(
    processor: Processor, clip: Path, count: int
) -> None:
    """``Qwen2VLVideoProcessor.sample_frames`` with ``num_frames``, which needs torchvision."""
    assert processor.video_config is not None
    num_frames = round(count / 2) * 2
    wanted = torch.arange(0, 90, 90 / num_frames).int().tolist()
    config = replace(processor.video_config, sampling="steps")
    assert sampled(config, clip, nframes=count).times == tuple(i / 15.0 for i in wanted)


@pytest.mark.parametrize(
    ("start", "end", "first", "last"),
    [
        (1.0, 3.0, 15, 45),
        (1.01, 2.99, 16, 44),
        (None, 2.0, 0, 30),
        (4, None, 60, 89),
        (0, 99, 0, 89),
    ],
)
def test_part_of_a_file_is_the_one_that_qwen_vl_utils_takes(
    processor: Processor, clip: Path, start: float | None, end: float | None, first: int, last: int
) -> None:
    assert processor.video_config is not None
    video = sampled(processor.video_config, clip, video_start=start, video_end=end, nframes=6)
    expected = np.linspace(first, last, 6).round() / 15.0
    assert video.times == tuple(expected.tolist())


@pytest.mark.parametrize(
    "values",
    [
        {"max_pixels": 20_000},
        {"min_pixels": 2048, "max_pixels": 9000},
        {"min_pixels": 200_000, "max_pixels": 10**6},
        {"min_pixels": 1024, "total_pixels": 20_000},
        {"total_pixels": 2 * 10**6},
        {"resized_height": 70, "resized_width": 130},
    ],
)
def test_frames_are_as_large_as_qwen_vl_utils_makes_them(
    processor: Processor, values: dict[str, int]
) -> None:
    """By ``fetch_video``, whose frames transformers takes with ``do_resize=False``."""
    least = values.get("min_pixels", 128 * FACTOR**2)
    share = values.get("total_pixels", int(128_000 * FACTOR**2 * 0.9)) / len(FRAMES) * 2
    most = max(min(values.get("max_pixels", 768 * FACTOR**2), share), int(least * 1.05))
    height, width = 96, 128
    if "resized_height" in values:
        height, width = values["resized_height"], values["resized_width"]
        least, most = 4 * FACTOR**2, 16384 * FACTOR**2
    size = smart_resize(height, width, FACTOR, least, most)
    assert processor.video_config is not None
    config = MediaOptions.read(values, "x").of_video(processor.video_config)
    assert fit_video("video", len(FRAMES), 96, 128, config) == size
    found = see(processor, {"type": "video", "video": FRAMES, **values})
    pixels = torch.from_numpy(np.stack([np.asarray(frame) for frame in FRAMES]))
    assert torch.equal(found.patches, reference_video(pixels, config))
    assert found.grid_thw.tolist() == [[3, size[0] // 16, size[1] // 16]]


def test_frames_bounded_each_have_transformers_bounds(processor: Processor) -> None:
    """As ``Qwen2VLVideoProcessor`` takes ``min_pixels`` and ``max_pixels``."""
    assert processor.video_config is not None
    own = replace(processor.video_config, per_frame=True, min_pixels=4096, max_pixels=65536)
    for values, least, most in (
        ({"max_pixels": 9000}, 4096, 9000),
        ({"min_pixels": 20_000}, 20_000, 65536),
    ):
        config = MediaOptions.read(values, "x").of_video(own)
        assert fit_video("x", 6, 96, 128, config) == smart_resize(96, 128, FACTOR, least, most)


@pytest.mark.parametrize(
    ("part", "ignored"),
    [
        ({"type": "image", "image": PICTURE, "spam": 1, "fps": 2}, ("spam", "fps")),
        (
            {"type": "image_url", "image_url": {"url": URI, "detail": "high", "x": 1}},
            ("image_url.x",),
        ),
        ({"type": "image_url", "image_url": {"url": URI, "detail": "low"}}, ("image_url.detail",)),
        ({"type": "video", "video": FRAMES, "nframes": 4, "raw_fps": 9}, ("nframes", "raw_fps")),
        ({"type": "video", "video": FRAMES, "sample_fps": 1, "fps": 2}, ("fps",)),
        (
            {"type": "video", "video": b"file", "sample_fps": 1, "timestamps": []},
            ("sample_fps", "timestamps"),
        ),
        ({"type": "text", "text": "x", "cache_control": {}, "annotations": []}, ("cache_control",)),
    ],
)
def test_other_keys_are_named(processor: Processor, part: Any, ignored: tuple[str, ...]) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": ["x", part]}]
    expected = tuple(f"messages[1].content[1].{name}" for name in ignored)
    assert processor.ignored_keys(messages) == expected


def test_other_keys_are_logged_for_the_users_own_prompts(
    processor: Processor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        see(processor, {"type": "image", "image": PICTURE, "maxpixels": 1})
    assert "messages[0].content[0].maxpixels" in caplog.text


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"max_pixels": 0}, "max_pixels: expected a whole number from 1 to 2147483647, got 0"),
        ({"max_pixels": "5000"}, "max_pixels: expected a whole number"),
        ({"min_pixels": 1e12}, "min_pixels: expected a whole number"),
        ({"min_pixels": float("nan")}, "min_pixels: expected a whole number"),
        ({"max_pixels": True}, "max_pixels: expected a whole number"),
        ({"max_pixels": 4096.5}, "max_pixels: expected a whole number"),
        ({"min_pixels": 9, "max_pixels": 8}, "min_pixels: expected at most max_pixels (8), got 9"),
        ({"resized_height": 64}, "resized_height: expected resized_height and resized_width"),
        ({"fps": 0}, "fps: expected frames a second from 0.001 to 1000, got 0"),
        ({"sample_fps": 10**400}, "sample_fps: expected frames a second"),
        ({"timestamps": 3}, "timestamps: expected a list with the second of each frame, got 3"),
        ({"timestamps": [0, -1]}, "timestamps[1]: expected seconds from 0 to 1e+06, got -1"),
        ({"timestamps": [1, 0]}, "timestamps: expected seconds in ascending order"),
        ({"timestamps": [0]}, "video: 1 timestamps for 6 frames"),
        ({"timestamps": [0] * 6, "sample_fps": 1}, "expected sample_fps or timestamps, got both"),
        ({"min_pixels": 2**31 - 1}, "pixels after resizing, the limit is"),
    ],
)
def test_bad_values_are_refused_in_one_line(
    processor: Processor, values: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError) as caught:
        see(processor, {"type": "video", "video": FRAMES, **values})
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"nframes": 91}, "nframes: expected from 1 to the video's 90, got 91"),
        ({"nframes": 4, "fps": 1}, "nframes: expected fps or nframes, got both"),
        ({"video_start": 5, "video_end": 4}, "video_start: expected at most video_end (4), got 5"),
        ({"video_start": 9}, "expected two frames or more between them"),
        ({"video_start": 1.0, "video_end": 1.05}, "expected two frames or more between them"),
        ({"video_start": "1"}, "video_start: expected seconds from 0"),
    ],
)
def test_bad_values_of_a_file_are_refused_in_one_line(
    processor: Processor, clip: Path, values: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError) as caught:
        see(processor, {"type": "video", "video": str(clip), **values})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_image_is_resized_to_no_more_than_the_limit(processor: Processor) -> None:
    sides = {"resized_height": 2**30, "resized_width": 2**30, "max_pixels": 2**30}
    with pytest.raises(UserError, match="32768x32768 pixels after resizing, the limit is"):
        see(processor, {"type": "image", "image": PICTURE, **sides})


def test_tiles_have_no_pixels_to_ask_for() -> None:
    from trt_eagle3.multimodal.visual_part import read_visual

    part = {"type": "video", "video": FRAMES, "max_pixels": 9, "total_pixels": 9, "fps": 1}
    read = read_visual(part, tiled=True)
    assert read is not None
    assert (read.given, read.ignored) == ({"fps": 1}, ("max_pixels", "total_pixels"))
    assert frame_indices(
        90,
        15.0,
        PixelConfig(
            14, 1, 2, 9, 9, (0.5,) * 3, (0.5,) * 3, 1 / 255, 3, sampling="middles", num_frames=8
        ),
    ).tolist() == [5, 16, 28, 39, 50, 61, 73, 84]
