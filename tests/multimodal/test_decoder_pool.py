"""Decoding in other processes: the same pixels, a deadline that holds, clients that take turns,
and nothing left.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.multimodal import bombs
from tests.multimodal.bombs import encode, endless_jpeg
from tests.multimodal.record_goldens import pattern
from tests.multimodal.test_image import picture
from tests.multimodal.test_video import CONFIG, write_file
from tests.waiting import wait_for
from trt_eagle3.errors import EnvironmentMissingError, RequestCancelledError, UserError
from trt_eagle3.multimodal import LOCAL_MEDIA, MediaPolicy
from trt_eagle3.multimodal import decoder_pool as pool_module
from trt_eagle3.multimodal.caller import NO_CALLER, Caller
from trt_eagle3.multimodal.decoder_pool import DecoderPool, _Process
from trt_eagle3.multimodal.media_job import MediaJob, run_here, run_job

SMALL = encode(picture(), "JPEG")
STRANGERS = MediaPolicy(
    max_jpeg_scans=None,
    paths=False,
    formats=("PNG", "JPEG"),
    max_pixels=1 << 25,
    decode_timeout_s=20.0,
)
SLOW = endless_jpeg()


def job(kind: Any = "image", policy: MediaPolicy = LOCAL_MEDIA, **options: Any) -> MediaJob:
    return MediaJob(kind, "image x", policy, CONFIG, **options)


def descriptors() -> list[str]:
    """Sockets, pipes and shared memory that this process holds."""
    found = (str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return [name for name in found if name.startswith(("socket:", "pipe:", "/memfd:trt-eagle3"))]


_others = set[int]()


@pytest.fixture(autouse=True)
def earlier_processes() -> None:
    """Engines and templates of other tests in this process may have some, which are not counted."""
    _others.clear()
    _others.update(bombs.children())


def children() -> set[int]:
    """Processes that this test has started."""
    return bombs.children() - _others


@pytest.fixture
def pool() -> Iterator[DecoderPool]:
    pool = DecoderPool(3)
    yield pool
    pool.close()


def decode(
    pool: DecoderPool, data: bytes = SMALL, caller: Caller = NO_CALLER, **options: Any
) -> Any:
    with pool.run(job(**options), data, caller) as parts:
        [part] = parts
    return part.array


@pytest.mark.parametrize("kind", ["image", "frame"])
def test_process_decodes_to_the_same_pixels(pool: DecoderPool, kind: Any) -> None:
    for height, width in ((30, 40), (1100, 1300), (64, 64)):
        data = encode(Image.fromarray(pattern(1, 1, height, width)[0]))
        with run_here(job(kind), data) as parts, pool.run(job(kind), data, NO_CALLER) as others:
            [here], [there] = parts, others
        np.testing.assert_array_equal(here.array, there.array)
        assert list(here.facts.get("grid", ())) == list(there.facts.get("grid", ()))


def test_arrays_stay_when_the_process_goes_on(pool: DecoderPool) -> None:
    first = decode(pool)
    kept = first.copy()
    decode(pool, encode(picture().transpose(Image.Transpose.FLIP_LEFT_RIGHT), "JPEG"))
    np.testing.assert_array_equal(first, kept)


def test_video_comes_frame_by_frame_as_it_is_read(pool: DecoderPool, tmp_path: Path) -> None:
    path = write_file(tmp_path / "clip.mp4")
    expected = list(run_job(job("video", path=str(path)), b""))
    for options, data in (({"path": str(path)}, b""), ({}, path.read_bytes())):
        with pool.run(job("video", **options), data, NO_CALLER) as parts:
            found = list(parts)
        assert found[0].facts == expected[0].facts
        assert len(found) == len(expected)
        for here, there in zip(expected[1:], found[1:], strict=True):
            np.testing.assert_array_equal(here.array, there.array)


def test_times_of_as_many_frames_as_a_server_takes_come_whole(
    pool: DecoderPool, tmp_path: Path
) -> None:
    clip = write_file(tmp_path / "clip.mp4", 7200, 29, (16, 16)).read_bytes()
    policy, config = replace(STRANGERS, max_video_frames=7200), replace(CONFIG, num_frames=7200)
    wanted = MediaJob("video", "video x", policy, config)
    with pool.run(wanted, clip, NO_CALLER) as parts:
        assert next(parts).facts["times"] == [i / 29 for i in range(7200)]
    few = replace(wanted, policy=replace(STRANGERS, max_video_frames=7000))
    with (
        pytest.raises(UserError, match="video x: 7200 frames to use, the limit is 7000"),
        pool.run(few, clip, NO_CALLER) as parts,
    ):
        next(parts)


def test_video_that_is_left_early_costs_its_process_and_nothing_else(
    pool: DecoderPool, tmp_path: Path
) -> None:
    video = job("video", path=str(write_file(tmp_path / "clip.mp4")))
    with pool.run(video, b"", NO_CALLER) as parts:
        next(parts)
        next(parts)
    assert decode(pool) is not None


def test_process_imports_no_torch() -> None:
    program = (
        "import sys, trt_eagle3.multimodal.decoder_process as p; print('torch' in sys.modules, "
        "'PIL' in sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert told.split() == ["False", "True"]


def test_refusals_of_a_process_are_those_of_this_one(pool: DecoderPool) -> None:
    for data in (b"", b"no image", SMALL[:400], encode(picture(), "GIF")):
        with pytest.raises(UserError) as here:
            list(run_job(job(policy=STRANGERS), data))
        with pytest.raises(UserError) as there:
            decode(pool, data, policy=STRANGERS)
        assert str(there.value) == str(here.value)
    assert len(children()) == 1, "a refusal ends no process"


def test_job_past_its_deadline_is_ended_and_the_next_one_is_served(pool: DecoderPool) -> None:
    decode(pool)
    [first] = children()
    start = time.monotonic()
    with pytest.raises(UserError, match=r"image x: not decoded within 0.3 s"):
        decode(pool, SLOW, policy=replace(STRANGERS, decode_timeout_s=0.3))
    assert time.monotonic() - start < 8, "of half a minute or more"
    assert first not in children()
    np.testing.assert_array_equal(decode(pool), next(run_job(job(), SMALL)).array)


def test_cancelled_job_is_left_at_once(pool: DecoderPool) -> None:
    decode(pool)
    over = threading.Event()
    start = time.monotonic()
    threading.Timer(0.3, over.set).start()
    with pytest.raises(RequestCancelledError):
        decode(pool, SLOW, Caller(cancelled=over.is_set))
    assert 0.3 <= time.monotonic() - start < 8, "of half a minute or more"


def test_request_that_is_cancelled_in_the_queue_leaves_it(pool: DecoderPool) -> None:
    end, over = threading.Event(), threading.Event()
    with ThreadPoolExecutor(4) as threads:
        holding = [
            threads.submit(decode, pool, SLOW, Caller(cancelled=end.is_set)) for _ in range(3)
        ]
        wait_for(lambda: len(children()) == 3)
        waiting = threads.submit(decode, pool, SMALL, Caller(cancelled=over.is_set))
        over.set()
        with pytest.raises(RequestCancelledError):
            waiting.result(30)
        assert not any(future.done() for future in holding)
        end.set()
    assert decode(pool) is not None


def test_images_of_one_client_leave_a_process_to_the_others(pool: DecoderPool) -> None:
    decode(pool)
    end = threading.Event()
    with ThreadPoolExecutor(8) as threads:
        greedy = [
            threads.submit(decode, pool, SLOW, Caller("greedy", end.is_set)) for _ in range(6)
        ]
        wait_for(lambda: len(children()) == 2)
        for _ in range(3):
            decode(pool, caller=Caller("modest"))
        waited_for = [future for future in greedy if future.done()]
        end.set()
        assert {type(future.exception()) for future in greedy} == {RequestCancelledError}
    assert not waited_for


def test_job_that_kills_its_process_is_refused_and_the_next_one_is_served(
    pool: DecoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = _Process._receive

    def killed(process: _Process, *args: Any) -> Any:
        os.kill(process._popen.pid, signal.SIGSEGV)
        return receive(process, *args)

    with monkeypatch.context() as patch:
        patch.setattr(_Process, "_receive", killed)  # of a job that was begun
        with pytest.raises(UserError, match="image x: the process that decoded it ended"):
            decode(pool, SLOW)
    assert decode(pool) is not None


def test_idle_process_that_was_killed_is_replaced(pool: DecoderPool) -> None:
    decode(pool)
    [process] = children()
    os.kill(process, signal.SIGKILL)
    assert decode(pool) is not None


def test_memory_of_a_process_is_bounded_for_strangers_only(pool: DecoderPool) -> None:
    def limit() -> str:
        [process] = children()
        lines = Path(f"/proc/{process}/limits").read_text().splitlines()
        return next(line for line in lines if line.startswith("Max address space")).split()[3]

    decode(pool)
    assert limit() == "unlimited"
    decode(pool, policy=STRANGERS)
    assert limit() == str((4 << 30) + (64 << 25))


def test_closed_pool_leaves_no_process_and_no_descriptor() -> None:
    gc.collect()
    before, held = children(), sorted(descriptors())
    pool = DecoderPool(3)
    decode(pool)
    with pytest.raises(UserError, match="not decoded"):
        decode(pool, SLOW, policy=replace(STRANGERS, decode_timeout_s=0.2))
    with ThreadPoolExecutor(2) as threads:
        working = [threads.submit(decode, pool, SLOW) for _ in range(2)]
        wait_for(lambda: len(children() - before) == 2)
        pool.close()
        assert {type(future.exception(30)) for future in working} <= {
            RequestCancelledError,
            UserError,
        }
    with pytest.raises(RequestCancelledError):
        decode(pool)
    assert children() == before
    assert sorted(descriptors()) == held
    pool.close()


def test_forgotten_pool_ends_its_processes() -> None:
    before = children()
    decode(DecoderPool(2))
    gc.collect()
    assert children() == before


def test_processes_end_with_a_parent_that_is_killed() -> None:
    program = (
        "import threading, time\n"
        "from tests.multimodal.bombs import endless_jpeg\n"
        "from trt_eagle3.multimodal.decoder_pool import DecoderPool\n"
        "from trt_eagle3.multimodal.caller import NO_CALLER\n"
        "from trt_eagle3.multimodal.media_job import MediaJob\n"
        "from trt_eagle3.multimodal.pixel_config import PixelConfig\n"
        "from trt_eagle3.multimodal.policy import LOCAL_MEDIA\n"
        f"pool, job = DecoderPool(2), MediaJob('image', 'x', LOCAL_MEDIA, {CONFIG})\n"
        "def decode():\n"
        "    with pool.run(job, endless_jpeg(), NO_CALLER) as parts: list(parts)\n"
        "threading.Thread(target=decode, daemon=True).start()\n"
        "while not pool._all: time.sleep(0.01)\n"
        "print(next(iter(pool._all))._popen.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        process = int(parent.stdout.readline())
        parent.kill()
    wait_for(lambda: not Path(f"/proc/{process}").exists())


def test_interpreter_that_cannot_run_it_is_reported_in_one_line(
    pool: DecoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_interpreter", lambda: "/bin/false")
    with pytest.raises(
        EnvironmentMissingError,
        match=r"decoding images: the process does not start \(exit status 1\)",
    ):
        decode(pool)
    monkeypatch.setattr(pool_module, "_interpreter", lambda: "/absent/python")
    with pytest.raises(EnvironmentMissingError, match="No such file"):
        decode(pool)


def test_process_that_was_started_before_takes_the_first_job() -> None:
    pool = DecoderPool(2)
    try:
        for _ in range(2):
            pool.start_one()
        [process] = pool._all
        assert decode(pool) is not None
        assert pool._all == {process}
    finally:
        pool.close()
