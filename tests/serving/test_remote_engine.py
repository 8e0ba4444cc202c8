"""The engine in a process of its own: it answers as one in this process does, and ends in time."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.site import Site, serving
from tests.tiny import build_tiny
from tests.waiting import wait_for
from trt_eagle3.decode import loaded_bundle
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.request.answer import Answer
from trt_eagle3.decode.request.conversation import RawPrompt
from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.engine.bundle.record import BUNDLE_FILE
from trt_eagle3.errors import OverloadedError, UserError
from trt_eagle3.multimodal import LOCAL_MEDIA
from trt_eagle3.multimodal.caller import NO_CALLER
from trt_eagle3.serving.channel import Channel, Close, News
from trt_eagle3.serving.engine_process import EngineHost, EngineJob
from trt_eagle3.serving.remote_engine import RemoteEngine, _RemoteAnswer

LIMITS = {"max_batch_size": 2, "max_waiting": 2, "max_seq_len": 4096}
PROMPTS = ["What is 12 plus 30?", "What is 7 times 6?", "Say hello."]
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
# ten seconds and more, also on a fast machine: for who is to be cancelled
ENDLESS = LONG.updated(max_tokens=4000)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"), limits=LIMITS)


def job(path: Path) -> EngineJob:
    return EngineJob.of_bundle(path, LOCAL_MEDIA, split_special_tokens=None, log_level="error")


@contextmanager
def remote(path: Path) -> Iterator[RemoteEngine]:
    with RemoteEngine(job(path)) as engine:
        engine.attach(path)
        engine.wait_until_ready()
        yield engine


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[RemoteEngine]:
    with remote(bundle) as found:
        yield found


@pytest.fixture(scope="module")
def site(engine: RemoteEngine) -> Iterator[Site]:
    with serving(engine) as found:
        yield found


@pytest.fixture(autouse=True)
def settled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nobody's answer is left to the next test."""
    yield
    if "engine" in request.fixturenames:
        engine: RemoteEngine = request.getfixturevalue("engine")
        wait_for(lambda: engine.metrics().running == 0 == engine.metrics().waiting)
        assert not engine._answers


def test_answers_are_those_of_an_engine_in_this_process(bundle: Path, engine: RemoteEngine) -> None:
    with LLM(bundle) as near:
        for prompt in PROMPTS:
            scored = {"temperature": 0.9, "seed": 3, "logprobs": 1, "prompt_logprobs": 1}
            for options in ({}, {"stop": ["4"]}, scored):
                sampling = SamplingParams(max_tokens=24).updated(**options)
                request = Request(prompt, sampling=sampling)
                here, there = near.submit(request), engine.submit(request)
                chunks = [list(here), list(there)]
                assert chunks[0] == chunks[1]
                wanted, found = here.generation, there.generation
                for name in ("text", "token_ids", "finish_reason", "prompt_tokens", "logprobs"):
                    assert getattr(found, name) == getattr(wanted, name)
                entries = [list(g.prompt_logprobs or ()) for g in (found, wanted)]
                assert entries[0] == entries[1]
                assert bool(entries[0]) == ("prompt_logprobs" in options)


def test_prompts_are_prepared_here(bundle: Path, engine: RemoteEngine) -> None:
    ids = engine.prepare(RawPrompt(PROMPTS[0]), caller=NO_CALLER).token_ids.tolist()
    with LLM(bundle) as near:
        assert ids == near.prepare(RawPrompt(PROMPTS[0])).token_ids.tolist()


def test_what_is_wrong_with_a_prompt_comes_out_of_its_answer(engine: RemoteEngine) -> None:
    with pytest.raises(UserError, match="the limit is"):
        engine.submit(Request("word " * 9000)).finish()
    assert engine.metrics().requests["rejected"] >= 1


def test_requests_beyond_the_queue_are_refused_and_the_others_answered(
    engine: RemoteEngine, site: Site
) -> None:
    def submit() -> Answer:
        answer = engine.submit(Request(PROMPTS[0], sampling=ENDLESS))
        answer.read_at_end()  # else it soon gives way to those that wait
        return answer

    answers = [submit() for _ in range(2)]
    wait_for(lambda: engine.metrics().running == 2)
    answers += [submit() for _ in range(2)]
    wait_for(lambda: engine.metrics().waiting == 2)
    status, found = site.chat(messages=[{"role": "user", "content": "Hello"}])
    assert (status, "wait already" in found["error"]["message"]) == (503, True)
    refused = engine.submit(Request(PROMPTS[2]))
    with pytest.raises(OverloadedError, match="2 requests wait already"):
        refused.finish()
    for answer in answers:
        answer.cancel()
    assert {answer.finish().finish_reason for answer in answers} == {"cancelled"}


def test_reader_that_stalls_makes_its_sequence_wait_and_goes_on_later(
    engine: RemoteEngine,
) -> None:
    slow = engine.submit(Request(PROMPTS[0], sampling=LONG, speculation=False))
    wait_for(lambda: slow.lagging)
    generated: list[int] = []

    def stands_still() -> bool:
        generated.append(engine.metrics().generated_tokens)
        return len(generated) > 5 and len(set(generated[-5:])) == 1

    wait_for(stands_still)
    unread = len(slow._chunks)
    assert unread < 300, "all of it was sent to a reader that does not read"
    assert engine.submit(Request(PROMPTS[1])).finish().finish_reason in ("stop", "length")
    assert len(list(slow)) >= unread
    assert len(slow.generation.token_ids) == LONG.max_tokens


@pytest.mark.parametrize("moment", ["seen to lag", "said to lag"])
def test_reader_that_catches_up_while_it_is_said_to_lag_is_said_to_have_caught_up(
    moment: str,
) -> None:
    """Else its sequence would wait for ever: nobody reads what does not come."""
    sent: list[Any] = []

    def send(message: Any) -> None:
        if moment == "said to lag":
            reader.read_all()
        sent.append(message)

    engine = object.__new__(RemoteEngine)
    engine._channel = SimpleNamespace(send=send)  # type: ignore[assignment]
    reader = _Reader(lambda: engine._look_at(0), moment == "seen to lag")
    engine._answers = {0: reader}
    engine._deliver(News([(0, ((1,), "a", None, ()))] * 40, []))
    assert [message.lags for message in sent] == [True, False]


class _Reader(_RemoteAnswer):
    """It reads all that there is in the moment in which it is seen to lag, or later."""

    def __init__(self, wake: Callable[[], None], when_seen: bool) -> None:
        super().__init__(wake)
        self._when_seen = when_seen

    @property
    def lagging(self) -> bool:
        found = super().lagging
        if found and self._when_seen:
            self._when_seen = False
            self.read_all()
        return found

    def read_all(self) -> None:
        while self._next() is not None:
            pass


def test_client_that_hangs_up_stops_its_request(engine: RemoteEngine, site: Site) -> None:
    before = engine.metrics().requests["cancelled"]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4000, "ignore_eos": True}
    with site.hang_up_later(body):
        wait_for(lambda: engine.metrics().running == 1)
    wait_for(lambda: engine.metrics().requests["cancelled"] == before + 1)


def test_events_join_to_the_text_of_the_whole_answer(site: Site) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPTS[0]}]}
    _, whole = site.chat(**asked)
    parts = [event["choices"][0]["delta"].get("content", "") for event in site.events(**asked)]
    assert "".join(parts) == whole["choices"][0]["message"]["content"]
    status, text, _ = site.request("GET", "/metrics")
    assert (status, "trt_eagle3_requests_total" in text) == (200, True)


def test_server_leaves_the_gpu_of_its_engine_alone(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take memory there, and see less of it than the engine may have."""
    copied = Path(shutil.copytree(bundle, tmp_path / "tiny"))
    record = json.loads((copied / BUNDLE_FILE).read_text())
    record["config"]["engine"] |= {"backend": "torch", "device": "cuda"}
    (copied / BUNDLE_FILE).write_text(json.dumps(record))
    asked: list[str] = []
    for name in ("read_policy", "free_bytes"):  # a table of widths is for one kind of GPU
        monkeypatch.setattr(loaded_bundle, name, lambda *_, name=name: asked.append(name))
    near = LoadedBundle.open(copied)
    assert asked == ["read_policy", "free_bytes"]
    asked.clear()
    engine = RemoteEngine.__new__(RemoteEngine)
    monkeypatch.setattr(RemoteEngine, "wait_until_open", lambda _: near.limits)
    engine.attach(copied)
    assert (engine.bundle.device, engine.bundle.limits) == ("cuda", near.limits)
    assert "at once" in engine.bundle.capacity
    assert not asked


def test_bundle_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="no bundle here"),
        RemoteEngine(job(tmp_path)) as engine,
    ):
        engine.wait_until_open()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0]


def test_process_ends_with_a_server_that_was_killed(bundle: Path) -> None:
    code = (
        "import time; from pathlib import Path\n"
        "from tests.serving.test_remote_engine import job\n"
        "from trt_eagle3.serving.remote_engine import RemoteEngine\n"
        f"engine = RemoteEngine(job(Path({str(bundle)!r})))\n"
        "engine.wait_until_ready()\n"
        "print(engine._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert _is_alive(pid)
        server.kill()
    wait_for(lambda: not _is_alive(pid))


@pytest.mark.parametrize("told", [True, False])
def test_process_that_is_still_opening_ends_with_its_server(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """At once: what it opens may take minutes."""
    monkeypatch.setattr(EngineHost, "_open", lambda *_: None)
    ours, theirs = socket.socketpair()
    host, server = EngineHost(Connection(theirs.detach())), Channel(Connection(ours.detach()))
    server.send(job(bundle))
    if told:
        server.send(Close())
    server.close()
    assert host.run() is told
    host._channel.close()
