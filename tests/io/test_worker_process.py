"""Processes that run what strangers wrote: cancelled, killed, closed, several of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trt_eagle3.errors import RequestCancelledError
from trt_eagle3.io.worker_process import WorkerProcess

# "stop": works until it is asked to stop; "wait": works on, whatever comes; "die": ends.
SCRIPT = """
import json, os, sys, time
for line in sys.stdin.buffer:
    if line == b"\\n":
        continue
    what = json.loads(line)
    if what == "die":
        break
    if what == "stop":
        os.read(0, 1)
    if what == "wait":
        time.sleep(60)
    sys.stdout.buffer.write(json.dumps({"pid": os.getpid(), "echo": what}).encode() + b"\\n")
    sys.stdout.buffer.flush()
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    (tmp_path / "script.py").write_text(SCRIPT)
    made = WorkerProcess(str(tmp_path / "script.py"), "test", count=2)
    yield made
    made.close()


def ask(worker: WorkerProcess, what: str) -> dict[str, object] | None:
    return worker.ask(json.dumps(what).encode())


def test_worker_asked_again_is_the_same_process(worker: WorkerProcess) -> None:
    first, again = ask(worker, "a"), ask(worker, "b")
    assert first is not None
    assert again is not None
    assert (first["echo"], again["echo"]) == ("a", "b")
    assert first["pid"] == again["pid"]


def test_worker_whose_request_was_its_end_is_replaced(worker: WorkerProcess) -> None:
    assert ask(worker, "die") is None
    answer = ask(worker, "a" * 3_000_000)
    assert answer is not None
    assert answer["echo"] == "a" * 3_000_000


@pytest.mark.parametrize(("what", "lives"), [("stop", True), ("wait", False)])
def test_cancelled_request_frees_its_worker(worker: WorkerProcess, what: str, lives: bool) -> None:
    before = ask(worker, "a")
    left = threading.Event()
    threading.Timer(0.1, left.set).start()
    start = time.monotonic()
    with pytest.raises(RequestCancelledError):
        worker.ask(json.dumps(what).encode(), left.is_set)
    after = ask(worker, "b")
    assert time.monotonic() - start < 5
    assert before is not None
    assert after is not None
    assert after["echo"] == "b"
    assert (after["pid"] == before["pid"]) == lives


def test_two_processes_work_at_once_and_a_third_request_waits(worker: WorkerProcess) -> None:
    left = threading.Event()
    ends: list[BaseException] = []

    def wait() -> None:
        try:
            worker.ask(b'"wait"', left.is_set)
        except RequestCancelledError as error:
            ends.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not worker._all:
        time.sleep(0.001)
    assert ask(worker, "a") is not None, "the second process answers"
    second = threading.Thread(target=wait)
    second.start()
    deadline = time.monotonic() + 0.2
    with pytest.raises(RequestCancelledError):
        worker.ask(b'"third"', lambda: time.monotonic() > deadline)
    left.set()
    waiting.join()
    second.join()
    assert len(ends) == 2
    assert ask(worker, "b") is not None


def test_all_workers_are_started_by_asking_all(worker: WorkerProcess) -> None:
    worker.ask_all(b'"a"')
    assert len(worker._all) == len(worker._idle) == 2


def test_close_ends_a_request_at_work(worker: WorkerProcess) -> None:
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(ask(worker, "wait")))
    thread.start()
    while not worker._all:
        time.sleep(0.001)
    worker.close()
    thread.join(10)
    assert answers == [None]
