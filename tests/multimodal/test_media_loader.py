"""The images and videos of one request: a few at once, in order, and none for nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.multimodal.record_goldens import pattern
from tests.multimodal.test_image import encode
from tests.multimodal.test_patches import CLIP, CONFIG, reference_image, reference_video
from tests.multimodal.test_policy import site  # noqa: F401 (a fixture)
from tests.multimodal.test_video import write_file
from tests.peak_memory import peak_bytes
from trt_eagle3.errors import RequestCancelledError, UserError
from trt_eagle3.multimodal import LOCAL_MEDIA, MediaPolicy, Video, load_video, normalise
from trt_eagle3.multimodal.caller import NO_CALLER, Caller
from trt_eagle3.multimodal.decoder_pool import DecoderPool
from trt_eagle3.multimodal.media_loader import MediaLoader
from trt_eagle3.multimodal.pixel_config import PixelConfig
from trt_eagle3.multimodal.video_file import FrameTimes
from trt_eagle3.multimodal.video_patches import video_patches

IMAGE = Image.fromarray(pattern(1, 1, 90, 130)[0])


@pytest.fixture(scope="module")
def pool() -> Iterator[DecoderPool]:
    pool = DecoderPool(3)
    yield pool
    pool.close()


def loader(
    decoders: DecoderPool | None = None,
    caller: Caller = NO_CALLER,
    policy: MediaPolicy = LOCAL_MEDIA,
) -> MediaLoader:
    return MediaLoader(CLIP, CONFIG, policy, decoders, caller)


def test_image_of_any_source_has_the_reference_patches(pool: DecoderPool, tmp_path: Path) -> None:
    expected = reference_image(IMAGE, CLIP)
    path = tmp_path / "image.png"
    path.write_bytes(encode(IMAGE))
    for decoders in (None, pool):
        for source in (IMAGE, path, str(path), encode(IMAGE)):
            assert torch.equal(normalise([loader(decoders).image(source, "x")]), expected)


def test_video_of_any_source_has_the_reference_patches(pool: DecoderPool, tmp_path: Path) -> None:
    frames = pattern(3, 5, 48, 64)
    expected = reference_video(torch.from_numpy(frames), CONFIG)
    images = [Image.fromarray(frame) for frame in frames]
    for i, image in enumerate(images):
        image.save(tmp_path / f"{i}.png")
    for decoders in (None, pool):
        for source in (
            images,
            [encode(image) for image in images],
            tmp_path,
            Video([encode(i) for i in images], fps=2),
        ):
            patches, times = loader(decoders).video(source, "video")
            assert torch.equal(normalise([patches]), expected)
            assert times == FrameTimes((0.0, 0.5, 1.0, 1.5, 2.0), 2.0)


def test_video_file_has_the_reference_patches(pool: DecoderPool, tmp_path: Path) -> None:
    path = write_file(tmp_path / "clip.mp4")
    loaded = load_video(path, CONFIG)
    expected = reference_video(loaded.frames, CONFIG)
    for decoders in (None, pool):
        for source in (path, path.read_bytes()):
            patches, times = loader(decoders).video(source, "video")
            assert torch.equal(normalise([patches]), expected)
            assert (times.seconds, times.fps) == (loaded.times, loaded.fps)


def test_video_that_ends_before_it_says_is_fitted_to_the_frames_that_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from trt_eagle3.multimodal import video_file

    path, true = write_file(tmp_path / "clip.mp4"), video_file.VideoFile._frames
    monkeypatch.setattr(
        video_file.VideoFile,
        "_frames",
        lambda self, c: ((i, f) for i, f in true(self, c) if i < 20),
    )
    loaded = load_video(path, CONFIG)
    assert 2 <= len(loaded.times) < 6
    patches, _ = loader().video(path, "video")
    assert torch.equal(normalise([patches]), reference_video(loaded.frames, CONFIG))


def test_items_are_loaded_at_once_and_come_in_order() -> None:
    together = threading.Barrier(3)

    def load(_: MediaLoader, seconds: float) -> float:
        together.wait(60)
        time.sleep(seconds)
        return seconds

    assert list(loader().each(load, [0.1, 0.0, 0.05])) == [0.1, 0.0, 0.05]


def test_item_that_fails_cancels_the_others() -> None:
    cancelled, together = threading.Event(), threading.Barrier(2)

    def load(loader: MediaLoader, index: int) -> None:
        together.wait(60)
        if index == 0:
            raise UserError("broken")
        while not loader.caller.cancelled():
            time.sleep(0.001)
        cancelled.set()

    with pytest.raises(UserError, match="broken"):
        list(loader().each(load, [0, 1]))
    assert cancelled.is_set()


def test_nothing_is_loaded_for_a_request_that_is_cancelled() -> None:
    over = loader(caller=Caller(cancelled=lambda: True))
    with pytest.raises(RequestCancelledError):
        over.image(IMAGE, "x")
    with pytest.raises(RequestCancelledError):
        over.video([IMAGE, IMAGE], "x")


def test_host_that_drips_holds_no_cancelled_request(site: str) -> None:  # noqa: F811
    over = threading.Event()
    threading.Timer(0.2, over.set).start()
    policy = MediaPolicy(paths=False, allowed_hosts=(site,), fetch_timeout_s=20.0)
    start = time.monotonic()
    with pytest.raises(RequestCancelledError):
        loader(caller=Caller(cancelled=over.is_set), policy=policy).image(
            f"http://{site}/drip", "x"
        )
    assert time.monotonic() - start < 10


def test_memory_of_a_video_is_that_of_its_patches() -> None:
    """768 frames of 320 x 320 at the model's limits: 236 MB of frames, 59 MB of patches."""
    frame = np.random.default_rng(0).integers(0, 256, (320, 320, 3), dtype=np.uint8)
    config = PixelConfig(16, 2, 2, 4096, 25165824, (0.5,) * 3, (0.5,) * 3, 1 / 255, 3)
    sizes = []

    def prepare() -> None:
        frames = (frame + np.uint8(i % 256) for i in range(768))
        sizes.append(video_patches(frames, 768, config).pixels.numel())

    grown = peak_bytes(prepare)
    (num_bytes,) = sizes
    assert 50e6 < num_bytes < 76e6
    assert grown < num_bytes + 30e6
