"""What happens to a server in operation: overload, SIGTERM, a restart, a crash of the backend
process.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.tiny import build_tiny
from tests.triton.hostile import SURROGATES, as_body
from tests.triton.server import Server, grpc, needs_server
from trt_eagle3.decode.llm import load
from trt_eagle3.triton.repository import deploy

pytestmark = [pytest.mark.triton, needs_server]

QUESTION = "What is 12 plus 30?"
SHORT = {"text_input": QUESTION, "max_tokens": 40, "ignore_eos": True}
LONG = {"text_input": QUESTION, "max_tokens": 300, "ignore_eos": True}
ENDLESS = {**LONG, "max_tokens": 4000}  # ten seconds and more, also on a fast machine


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    limits = {"max_batch_size": 1, "max_waiting": 2, "max_seq_len": 4096}
    return build_tiny(tmp_path_factory.mktemp("engines"), limits=limits)


@pytest.fixture(scope="module")
def only_server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("triton") / "repository"
    deploy(bundle, repository, serving={"log_prompts": True})
    with Server(repository) as server:
        yield server


@pytest.fixture
def server(only_server: Server) -> Server:
    """It runs, and its log is empty, whatever the test before this one did to it."""
    if only_server.process.poll() is not None:
        only_server.start()
    os.truncate(only_server.log_path, 0)
    return only_server


def refuse_surrogates(server: Server) -> None:
    """Ask for what is no Unicode text, which once kept a server from ending."""
    requests = [{"messages": messages} for messages in SURROGATES.values()]
    for reply in grpc(server, requests):
        assert "not Unicode text" in str(reply.error)
    for request in requests:
        for path in ("generate", "generate_stream"):
            status, text = server.post(path, as_body({**request, "stream": path != "generate"}))
            assert (status, "not Unicode text" in text) == (400, True), text


def test_overload_is_refused_and_sigterm_drains_and_the_server_starts_again(
    server: Server, bundle: Path
) -> None:
    offline = load(bundle)
    short, long = (
        offline.generate(QUESTION, max_tokens=n, ignore_eos=True).text for n in (40, 300)
    )
    offline.close()
    with ThreadPoolExecutor(3) as pool:
        # one runs, two wait, and whoever comes then is too many
        running = server.open_stream(**ENDLESS)
        begun = next(running)["text_output"]
        waiting = [pool.submit(server.generate, **SHORT) for _ in range(2)]
        server.wait_for_prompts(3)
        for _ in range(3):
            status, text = server.post("generate", json.dumps(SHORT).encode())
            assert status in {400, 503}  # Triton 2.51 says 400 where 503 is meant
            assert "max_waiting" in json.loads(text)["error"]
        while len(begun) < len(long):
            begun += next(running)["text_output"]
        assert begun.startswith(long)
        running.close()  # type: ignore[attr-defined]
        assert [post.result()["text_output"] for post in waiting] == [short, short]
        assert server.generate(text_input=QUESTION)["text_output"] == "12 plus 30 equals 42."
        server.wait_for_metrics(
            lambda m: sum(m[name] for name in m if "requests_total" in name) == 4
        )

        refuse_surrogates(server)
        # its first token is there: it runs, and waits no longer when the others come
        running = server.open_stream(**LONG)
        events = [next(running)]
        rest = pool.submit(list, running)
        whole = pool.submit(server.generate, **SHORT)
        stream = pool.submit(grpc, server, [{**LONG, "stream": True}])
        server.wait_for_prompts(7)
        start = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - start < 60, "of the hundred seconds that it may take"
        assert not server.ready()
        assert "".join(event["text_output"] for event in events + rest.result()) == long
        assert whole.result()["text_output"] == short
        assert "".join(r["text_output"][0] for r in stream.result()[0].responses) == long
    assert QUESTION in server.log()  # log_prompts asked for it

    server.start()
    assert server.generate(**SHORT)["text_output"] == short


def test_crash_of_the_backend_is_seen_by_readiness(server: Server) -> None:
    assert server.ready()
    words = Path(f"/proc/{server.stub()}/cmdline").read_text().split("\0")
    [region] = [Path("/dev/shm", word) for word in words if "shm_region" in word]
    assert region.exists()
    os.kill(server.stub(), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while server.ready():
        assert time.monotonic() < deadline, "still called ready with a dead backend"
        time.sleep(0.05)
    server.process.wait(60)  # so that whoever supervises it starts it again
    deadline = time.monotonic() + 60
    while region.exists():
        assert time.monotonic() < deadline, "shared memory is left behind"
        time.sleep(0.05)
