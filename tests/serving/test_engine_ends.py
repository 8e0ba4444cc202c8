"""However an engine's process ends, everybody who waits is told, and nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.tiny import build_tiny
from tests.waiting import wait_for
from trt_eagle3.decode.core import EngineCore
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.metrics import EngineMetrics
from trt_eagle3.decode.request.answer import Answer
from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.errors import ClosedError, EngineFailedError, TrtEagle3Error, UserError
from trt_eagle3.io import python_process
from trt_eagle3.serving import delivery, engine_process, remote_engine
from trt_eagle3.serving.channel import Channel, Close, Failed, News, Submit
from trt_eagle3.serving.delivery import interleaved
from trt_eagle3.serving.engine_process import EngineHost, EngineJob
from trt_eagle3.serving.remote_engine import RemoteEngine

JOB = EngineJob(LLM)  # type: ignore[arg-type]  # for processes that open no engine
ASKED = Request("Hi", sampling=SamplingParams(max_tokens=400, ignore_eos=True))
UNTIL_CLOSED = "while b'Close' not in end.recv(1 << 16): pass"


def pair() -> tuple[Connection, Connection]:
    return tuple(Connection(end.detach()) for end in socket.socketpair())  # type: ignore[return-value]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets an engine's process be a few lines, in which ``end`` is its end of the connection."""
    head = "import os, signal, socket, sys, time; end = socket.socket(fileno=int(sys.argv[1]))"

    def be(code: str) -> None:
        def start(descriptor: int) -> subprocess.Popen[bytes]:
            words = [sys.executable, "-S", "-c", f"{head}\n{code}", str(descriptor)]
            return subprocess.Popen(words, pass_fds=[descriptor])

        monkeypatch.setattr(remote_engine, "_start", start)

    return be


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL. Is there enough memory?"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV."),
        ("sys.exit(3)", "ended with status 3. See the log."),
        ("end.close(); time.sleep(60)", "closed its connection, and was killed."),
        ("end.send(b'\\0\\0\\0\\1?'); time.sleep(60)", "closed its connection, and was killed."),
    ],
)
def test_process_that_ends_while_it_opens_is_one_error_that_says_how(
    process: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    monkeypatch.setattr(remote_engine, "_STATUS_S", 0.5 if "sleep" in code else 60.0)
    process(code)
    with RemoteEngine(JOB) as engine, pytest.raises(EngineFailedError) as caught:
        engine.wait_until_open()
    assert str(caught.value) == f"engine: its process {said}"
    assert engine.failed


def test_answers_of_a_process_that_dies_end_with_an_error_and_whoever_asked_is_called(
    process: Callable[[str], None],
) -> None:
    process("end.recv(1); time.sleep(60)")
    called = threading.Event()
    with RemoteEngine(JOB) as engine:
        engine.on_failure(called.set)
        answer = engine.submit(ASKED)
        engine._process.kill()
        with pytest.raises(ClosedError, match="the engine's process ended"):
            answer.finish()
        assert called.wait(30)
        assert not engine.ready
        with pytest.raises(ClosedError, match="the engine has stopped"):
            engine.submit(ASKED)
    late: list[bool] = []
    engine.on_failure(lambda: late.append(True))
    assert late == [True]


def test_answers_that_the_process_had_no_time_to_end_are_cancelled_when_it_is_told_to_end(
    process: Callable[[str], None],
) -> None:
    process(UNTIL_CLOSED)
    with RemoteEngine(JOB) as engine:
        answer = engine.submit(ASKED)
    assert [chunk.finish_reason for chunk in answer] == ["cancelled"]
    assert not engine.failed


def test_process_that_hangs_is_ended_soon_after_it_is_told_to(
    process: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the server still has connections, so that clients hear of it."""
    monkeypatch.setattr(remote_engine, "_CLOSE_S", 0.1)
    process("time.sleep(60)")
    with RemoteEngine(JOB) as engine:
        answer = engine.submit(ASKED)
        engine.close()
        assert [chunk.finish_reason for chunk in answer] == ["cancelled"]


def test_whoever_waits_for_the_metrics_of_a_process_that_hangs_waits_until_it_is_closed(
    process: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "_METRICS_S", 600.0)
    monkeypatch.setattr(remote_engine, "_CLOSE_S", 600.0)
    process("time.sleep(60)")
    with RemoteEngine(JOB) as engine:
        engine._metrics = cast(EngineMetrics, "the last ones")
        waiting = threading.Thread(target=engine.metrics, daemon=True)
        waiting.start()
        wait_for(lambda: engine._owed.runs)
        engine.close()
        waiting.join(30)
        assert not waiting.is_alive()


def test_request_ends_in_time_though_its_engine_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def read() -> None:
        async for _ in interleaved([Answer(lambda: None)], 0.01):
            raise AssertionError

    monkeypatch.setattr(delivery, "_LATE_S", 0.05)
    with pytest.raises(TimeoutError, match=r"^it took longer than 0\.01 s\.$"):
        asyncio.run(read())
    assert caplog.messages == ["the engine has not ended a request 0.05 s after its deadline"]


def test_engine_that_is_closed_leaves_no_descriptor_and_no_thread(
    process: Callable[[str], None],
) -> None:
    process(UNTIL_CLOSED)
    before = {*Path("/proc/self/fd").iterdir()}, {*threading.enumerate()}
    with RemoteEngine(JOB):
        pass
    assert {*Path("/proc/self/fd").iterdir()} <= before[0]
    wait_for(lambda: {*threading.enumerate()} <= before[1])


def test_modules_where_the_server_runs_are_none_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(python_process, "_PROGRAM", "import json")
    assert remote_engine._start(0).wait(30) == 0


def test_message_that_cannot_be_sent_ends_the_connection_for_both_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else each would wait for the other."""
    ours, theirs = pair()
    one, other = Channel(ours), Channel(theirs)
    one.send("before")
    one.send(threading.Lock())
    assert other.receive() == "before"
    assert other.receive() is None
    assert one.receive() is None
    assert caplog.messages == ["a message cannot be sent"]
    one.close()
    other.close()


def test_messages_larger_than_a_socket_holds_cross_in_both_directions() -> None:
    ours, theirs = pair()
    ends = Channel(ours), Channel(theirs)
    big = bytes(8 << 20)
    for end in ends:
        for _ in range(4):
            end.send(big)
    for end in ends:
        assert [end.receive() for _ in range(4)] == [big] * 4
    for end in ends:
        end.close()


def test_requests_are_held_neither_while_they_are_sent_nor_once_they_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each may be as large as a body."""
    ours, theirs = pair()
    channel = Channel(ours)
    request = replace(ASKED, prompt="x" * (8 << 20))
    sent = weakref.ref(request)
    channel.send(Submit(0, request))
    del request
    wait_for(lambda: sent() is None)  # though the other end has read nothing yet

    received: list[weakref.ref[Request]] = []

    def submit(request: Request) -> Answer:
        received.append(weakref.ref(request))
        return Answer(lambda: None)

    host = EngineHost(theirs)
    monkeypatch.setattr(host, "_engine", SimpleNamespace(submit=submit, close=lambda: None))
    running = threading.Thread(target=host.run)
    running.start()
    wait_for(lambda: bool(received) and received[0]() is None)
    channel.send(Close())
    running.join()
    channel.close()


class _OddError(UserError):
    """As errors of libraries are: neither made from its message alone, nor picklable."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param, self.lock = param, threading.Lock()


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (_OddError("prompt: too odd", "messages"), UserError, "prompt: too odd"),
        (KeyError("rope"), EngineFailedError, "KeyError: 'rope'"),
        (RuntimeError("decoding failed: it did"), EngineFailedError, "decoding failed: it did"),
    ],
)
def test_any_error_reaches_the_reader_of_an_answer(
    error: Exception, kind: type[Exception], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its traceback is where the process writes its log."""

    def submit(_: Request) -> None:
        raise error

    with Hosted(SimpleNamespace(submit=submit, ready=True, close=lambda: None)) as channel:
        channel.send(Submit(7, ASKED))
        [[number, found, _]] = next_news(channel).ends
    assert (number, type(found), str(found)) == (7, kind, message)
    logged = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert logged == ([] if kind is UserError else [error])


@pytest.mark.parametrize(
    ("error", "said", "num_logged"),
    [
        (UserError("bundle: none"), "bundle: none", 0),
        (MemoryError(), "engine: no memory is left to open it", 0),
        (OSError("a\nb"), r"engine: cannot be opened: OSError: a\nb", 1),
    ],
)
def test_engine_that_cannot_be_opened_is_one_line(
    error: Exception, said: str, num_logged: int, caplog: pytest.LogCaptureFixture
) -> None:
    def open_engine() -> LLM:
        raise error

    ours, theirs = pair()
    host, channel = EngineHost(theirs), Channel(ours)
    host._open(EngineJob(open_engine, "error"))
    message = channel.receive()
    assert isinstance(message, Failed)
    assert isinstance(message.error, TrtEagle3Error)
    assert str(message.error).startswith(said)
    assert len(caplog.records) == num_logged
    host._channel.close()
    channel.close()


class Hosted:
    """An engine behind an ``EngineHost``, on a thread: the channel to it, and what ``run`` said."""

    told: bool | None = None

    def __init__(self, engine: Any) -> None:
        ours, theirs = pair()
        self._host, self._channel = EngineHost(theirs), Channel(ours)
        self._host._engine = engine
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.told = self._host.run()

    def __enter__(self) -> Channel:
        self._thread.start()
        return self._channel

    def __exit__(self, *_: object) -> None:
        self._channel.send(Close())
        self.join()
        self._channel.close()

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join(30)
        assert not self._thread.is_alive()


def next_news(channel: Channel) -> News:
    while (message := channel.receive()) is not None:
        if isinstance(message, News) and message.ends:
            return message
    raise AssertionError("no answer ended")


def test_death_of_the_thread_that_decodes_is_told_and_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the server would be healthy, and refuse every request."""

    def die(_: EngineCore) -> None:
        raise SystemExit("told to")

    monkeypatch.setattr(EngineCore, "_turn", die)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    engine = LLM(build_tiny(tmp_path))
    host = Hosted(engine)
    with closing(engine), host as channel:
        channel.send(Submit(0, ASKED))
        [[_, error, _]] = next_news(channel).ends
        assert str(error) == "decoding failed: SystemExit: told to"
        assert channel.receive() is None
        host.join()
    assert host.told is False


def test_process_whose_engine_does_not_close_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forward may hang, and who told it to end be killed before it ends this process."""
    ended = threading.Event()
    monkeypatch.setattr(engine_process, "_END_S", 0.05)
    monkeypatch.setattr(os, "_exit", lambda _: ended.set())
    with Hosted(SimpleNamespace(close=ended.wait)):
        pass
    assert ended.is_set()
