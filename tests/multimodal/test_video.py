"""Frames and their times from lists, folders and files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata, read_video_pyav

from tests.multimodal.record_goldens import pattern
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.multimodal import Video, load_video
from trt_eagle3.multimodal.pixel_config import PixelConfig
from trt_eagle3.multimodal.video import patch_times
from trt_eagle3.multimodal.video_file import frame_indices

CONFIG = PixelConfig(16, 2, 2, 4096, 16384, (0.5,) * 3, (0.5,) * 3, 1 / 255, 3)
PIXELS = pattern(4, 12, 20, 30)


def frames(count: int = 12) -> list[Image.Image]:
    return [Image.fromarray(frame) for frame in PIXELS[:count]]


def write_file(
    path: Path, count: int = 45, rate: int = 15, size: tuple[int, int] = (64, 48)
) -> Path:
    """An MP4 or Matroska of ``size`` (width, height)."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for pixels in pattern(8, count, size[1], size[0]):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


def test_list_is_used_whole_at_two_frames_per_second() -> None:
    video = load_video(frames(5), CONFIG)
    np.testing.assert_array_equal(video.frames.numpy(), PIXELS[:5])
    assert video.times == (0.0, 0.5, 1.0, 1.5, 2.0)


def test_folder_is_read_in_natural_order(tmp_path: Path) -> None:
    for i, frame in enumerate(frames()):
        frame.save(tmp_path / f"frame{i}.png")
    (tmp_path / "notes.txt").write_text("no frame")
    video = load_video(tmp_path, CONFIG)
    np.testing.assert_array_equal(video.frames.numpy(), PIXELS)


def test_given_timestamps_replace_the_rate() -> None:
    assert load_video(Video(frames(2), timestamps=[0, 7.25]), CONFIG).times == (0.0, 7.25)


def test_sampling_keeps_frames_at_their_times() -> None:
    video = load_video(Video(frames(), fps=4.0, sample=True), CONFIG)
    assert video.times == tuple(i / 4.0 for i in (0, 2, 4, 7, 9, 11))
    np.testing.assert_array_equal(video.frames.numpy(), PIXELS[[0, 2, 4, 7, 9, 11]])


@pytest.mark.parametrize("total", [1, 2, 3, 4, 5, 48, 49, 1000, 50000])
@pytest.mark.parametrize("fps", [0.5, 2.0, 23.976, 30.0])
def test_sampling_equals_hfs_rule(total: int, fps: float) -> None:
    # the processor itself cannot be constructed without torchvision; its rule needs three of its
    # settings
    settings = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    metadata = VideoMetadata(total_num_frames=total, fps=fps)
    expected = Qwen3VLVideoProcessor.sample_frames(settings, metadata)
    np.testing.assert_array_equal(frame_indices(total, fps, CONFIG), expected)


@pytest.mark.parametrize("count", range(1, 8))
def test_patch_times_equal_hf(count: int) -> None:
    times = [i / 3.7 for i in range(count)]
    expected = Qwen3VLProcessor._calculate_timestamps(None, list(range(count)), 3.7, 2)
    assert patch_times(times, 2) == expected
    assert times[::2] != expected or count == 1  # the first frame's own time would be noticed


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_file_is_sampled_and_decoded_as_hf_does(tmp_path: Path, suffix: str) -> None:
    path = write_file(tmp_path / f"clip.{suffix}")
    video = load_video(path, CONFIG)
    counted = frame_indices(45, 15.0, CONFIG)
    expected, _ = read_video_pyav(str(path), lambda **_: counted)
    np.testing.assert_array_equal(video.frames.numpy(), expected)
    assert video.times == tuple(i / 15.0 for i in counted)


def test_file_with_a_given_rate_uses_it(tmp_path: Path) -> None:
    video = load_video(Video(write_file(tmp_path / "clip.mp4"), fps=5.0), CONFIG)
    assert len(video.times) == 18
    assert video.times[-1] == 44 / 5.0


def test_file_without_pyav_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(EnvironmentMissingError, match="pip install av"):
        load_video(tmp_path / "clip.mp4", CONFIG)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ([], "no frames"),
        ("absent.mp4", "absent.mp4: no such file or folder"),
        ("https://example.com/clip.mp4", "remote images and videos are not fetched"),
        (b"bytes", "video (5 bytes): not a supported video"),
        (7, "expected a list of images, a folder or a file, got int"),
        (Video(frames(2), fps=0.0), "fps: expected a positive number, got 0.0"),
        (Video(frames(2), fps=2.0, timestamps=[0, 1]), "timestamps exclude fps"),
        (Video(frames(2), timestamps=[0]), "1 timestamps for 2 frames"),
        ([frames()[0], frames()[1].resize((9, 9))], "frame 1 is 9x9, frame 0 is 30x20"),
        ([frames()[0], b"broken"], "frame 1: unknown image format"),
    ],
)
def test_bad_video_is_refused_in_one_line(source: Any, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load_video(source, CONFIG)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_file_of_giant_frames_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file(tmp_path / "clip.mp4", count=3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3000)
    with pytest.raises(UserError, match="64x48 pixels, the limit is 3000"):
        load_video(path, CONFIG)


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no frames in this folder"):
        load_video(tmp_path, CONFIG)


def test_file_of_an_unknown_codec_is_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / "clip.mp4", count=3)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"mp4v", b"zzzz").replace(b"esds", b"zzzz"))
    with pytest.raises(UserError, match="an unknown codec"):
        load_video(path, CONFIG)


def test_file_that_is_no_video_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("av")
    (tmp_path / "notes.mp4").write_text("not a video")
    with pytest.raises(UserError, match=r"notes\.mp4: not a video that can be decoded"):
        load_video(tmp_path / "notes.mp4", CONFIG)
