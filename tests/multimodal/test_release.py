"""What a refused image or video held is free at once: no garbage collector runs here, and every
refusal is kept, with the frames that it came through.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.multimodal.bombs import encode, endless_jpeg, open_files
from tests.multimodal.record_goldens import pattern
from tests.multimodal.test_decoder_pool import children, descriptors
from tests.multimodal.test_patches import CONFIG
from tests.multimodal.test_video import write_file
from trt_eagle3.errors import RequestCancelledError, UserError
from trt_eagle3.multimodal import LOCAL_MEDIA, MediaPolicy
from trt_eagle3.multimodal.caller import NO_CALLER, Caller
from trt_eagle3.multimodal.decoder_pool import DecoderPool
from trt_eagle3.multimodal.media_loader import MediaLoader
from trt_eagle3.multimodal.pixel_config import PixelConfig

PLACES = 2


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def load(
    pool: DecoderPool | None,
    source: Any,
    config: PixelConfig = CONFIG,
    policy: MediaPolicy = LOCAL_MEDIA,
    caller: Caller = NO_CALLER,
) -> None:
    MediaLoader(config, config, policy, pool, caller).video(source, "video")


def refusals(folder: Path) -> dict[str, tuple[str, Callable[[DecoderPool | None], None]]]:
    """Ways in which a video is refused after its decoding began: what is said, and how to."""
    clip = write_file(folder / "clip.mp4")
    long = write_file(folder / "long.mp4", count=12, size=(16, 4096))
    single = write_file(folder / "single.mp4", count=1)
    frames = [encode(Image.fromarray(frame)) for frame in pattern(3, 12, 20, 30)]
    small = replace(LOCAL_MEDIA, max_video_pixels=1000)
    slow = replace(LOCAL_MEDIA, decode_timeout_s=0.3)
    odd = encode(Image.new("RGB", (9, 9)))
    tall = [encode(Image.new("RGB", (4, 1000)))] * 12
    nearest = replace(CONFIG, resample=1)

    def cancelled(pool: DecoderPool | None) -> None:
        checks = iter([False] * 6)
        over = Caller(cancelled=lambda: next(checks, True))
        load(pool, frames * 20, caller=over)

    return {
        "shape of a file": ("aspect ratio", lambda pool: load(pool, long)),
        "shape of a file in memory": ("aspect ratio", lambda pool: load(pool, long.read_bytes())),
        "filter": ("resample: expected", lambda pool: load(pool, clip, nearest)),
        "too few frames": ("at least 2 frames", lambda pool: load(pool, single)),
        "shape of a list": ("aspect ratio", lambda pool: load(pool, tall)),
        "sizes in a list": ("Resize all frames", lambda pool: load(pool, [*frames, odd, *frames])),
        "pixels of a list": ("the limit is 1000", lambda pool: load(pool, frames, policy=small)),
        "a broken frame": ("unknown image", lambda pool: load(pool, [*frames, b"x", *frames])),
        "a slow frame": (
            "not decoded within|aspect ratio",
            lambda pool: load(pool, [*tall, endless_jpeg()], policy=slow),
        ),
        "cancelled": ("cancelled", cancelled),
    }


@pytest.mark.usefixtures("no_gc")
def test_refused_videos_hold_no_place_process_or_file(tmp_path: Path) -> None:
    before, held, threads = children(), sorted(descriptors()), set(threading.enumerate())
    files = sorted(open_files(tmp_path))
    pool = DecoderPool(PLACES)
    kept = []
    for name, (expected, refuse) in refusals(tmp_path).items():
        with pytest.raises((UserError, RequestCancelledError), match=expected) as caught:
            refuse(pool)
        kept.append(caught)
        assert pool._turns._free == PLACES, name
        assert pool._all == set(pool._idle), name
        assert sorted(open_files(tmp_path)) == files, name
        assert set(threading.enumerate()) <= threads, name
    pool.close()
    assert children() == before
    assert sorted(descriptors()) == held


@pytest.mark.usefixtures("no_gc")
def test_refused_videos_leave_no_file_open_without_decoder_processes(tmp_path: Path) -> None:
    kept = []
    for name, (expected, refuse) in refusals(tmp_path).items():
        if name == "a slow frame":  # this process cannot be ended
            continue
        with pytest.raises((UserError, RequestCancelledError), match=expected) as caught:
            refuse(None)
        kept.append(caught)
        assert open_files(tmp_path) == [], name
