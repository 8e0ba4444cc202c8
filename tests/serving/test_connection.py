"""Clients that send half, or do not read: real sockets, and everybody else is answered
meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.serving.site import Site, serving
from tests.tiny import build_tiny
from tests.waiting import wait_for
from trt_eagle3.decode.llm import LLM, load
from trt_eagle3.serving import ServingConfig, connection
from trt_eagle3.serving import body as body_module

QUESTION = [{"role": "user", "content": "What is 12 plus 30?"}]
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
MEDIA = b'{"messages": [{"role": "user", "content": "data:'


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    limits = {"max_batch_size": 4, "max_waiting": 64, "max_seq_len": 4096, "max_kv_tokens": 4096}
    engine = load(build_tiny(tmp_path_factory.mktemp("engines"), limits=limits))
    engine.generate("Hello")
    yield engine
    engine.close()


def connect(site: Site, data: bytes = b"", receive_buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(60)
    client.connect(("127.0.0.1", site.port))
    client.sendall(data)
    return client


def ask(**body: Any) -> bytes:
    data = json.dumps({"messages": QUESTION, **body}).encode()
    return HEAD % len(data) + data


def read_all(client: socket.socket) -> bytes:
    """Until the server closes, or resets."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while block := client.recv(1 << 16):
            data += block
    return data


def health_ms(site: Site) -> float:
    start = time.perf_counter()
    assert site.request("GET", "/health")[0] == 200
    return 1000 * (time.perf_counter() - start)


@pytest.mark.parametrize(
    "data",
    [b"", b"GET /health HTTP/1.1\r\nHost:", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea"],
)
def test_half_sent_headers_are_cut_off_in_time(engine: LLM, data: bytes) -> None:
    with serving(engine, ServingConfig(header_timeout_s=0.3)) as site:
        start = time.monotonic()
        with connect(site, data) as client:
            dribbling = threading.Thread(target=_dribble, args=(client,), daemon=True)
            dribbling.start()
            assert read_all(client).count(b"HTTP/1.1 200") == data.count(b"\r\n\r\n")
            assert 0.3 <= time.monotonic() - start < 15, "of 20 s"
            dribbling.join()


def _dribble(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        for _ in range(400):
            client.sendall(b"x")
            time.sleep(0.05)


@pytest.mark.parametrize("dribbles", [False, True])
def test_half_sent_body_is_answered_with_408_in_time(engine: LLM, dribbles: bool) -> None:
    before = engine.metrics().requests.get("rejected", 0)
    with (
        serving(engine, ServingConfig(body_timeout_s=0.3)) as site,
        connect(site, HEAD % 9999 + b"{") as client,
    ):
        if dribbles:
            threading.Thread(target=_dribble, args=(client,), daemon=True).start()
        found = read_all(client)
        assert b"408 Request Timeout" in found
        assert b"nothing arrived for 0.3 s" in found
    assert engine.metrics().requests["rejected"] == before + 1


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nowhere"])
def test_request_of_two_lengths_is_answered_and_closes_its_connection(
    engine: LLM, path: bytes
) -> None:
    """What one reader takes for the body is the next request for another."""
    with serving(engine) as site:
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" % path
        body = b'{"prompt": "x", "max_tokens": 1}'
        chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        smuggled = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
        both = connect(site, head + b"Content-Length: 4\r\n\r\n" + chunk + smuggled)
        answer = read_all(both)
        assert answer.startswith(b"HTTP/1.1 200" if path != b"/nowhere" else b"HTTP/1.1 404")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"\r\nconnection: close\r\n" in answer.lower()
        one = connect(
            site, head + b"\r\n" + chunk + smuggled.replace(b"x", b"x\r\nConnection: close")
        )
        assert read_all(one).count(b"HTTP/1.1 ") == 2


def test_body_that_comes_slowly_but_in_time_is_answered(engine: LLM) -> None:
    with serving(engine, ServingConfig(body_timeout_s=30)) as site, connect(site) as client:
        data = ask(max_tokens=2)
        for start in range(0, len(data), 40):
            client.sendall(data[start : start + 40])
            time.sleep(0.02)
        assert b"200 OK" in client.recv(1000)


def test_body_that_goes_on_after_its_refusal_is_cut_off(engine: LLM) -> None:
    limits = ServingConfig(max_body_bytes=100, header_timeout_s=0.3)
    with serving(engine, limits) as site, connect(site, HEAD % 10_000_000 + b"x" * 1000) as client:
        threading.Thread(target=_dribble, args=(client,), daemon=True).start()
        assert b"413" in read_all(client)


def test_bodies_that_stand_still_give_their_room_to_others(
    engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget of two: two half-sent bodies of a stranger take all of it, until somebody sends a
    whole one.
    """
    monkeypatch.setattr(body_module, "_PATIENCE_S", 0.2)
    limits = ServingConfig(max_bodies_bytes=2_500_000, body_timeout_s=600)
    with serving(engine, limits) as site, contextlib.ExitStack() as stack:
        half = HEAD % 5_000_000 + MEDIA + b"A" * 1_000_000
        stalled = [stack.enter_context(connect(site, half)) for _ in range(2)]
        budget = site.server._front._budget
        wait_for(lambda: budget.num_bytes == 2 * (1_000_000 + len(MEDIA)))
        wait_for(lambda: all(lease.slow for lease in budget._reading))
        whole = {"messages": [{"role": "user", "content": "data:" + "A" * 1_000_000}]}
        status, text, _ = site.request("POST", "/v1/chat/completions", whole)
        assert (status, "the limit is" in text) == (400, True), text
        wait_for(lambda: any(b"503" in _received(client) for client in stalled))
        assert site.chat(messages=QUESTION, max_tokens=2)[0] == 200


def _received(client: socket.socket) -> bytes:
    try:
        client.settimeout(0.2)
        return client.recv(4096)
    except TimeoutError:
        return b""


def test_bodies_beyond_the_budget_are_refused(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "_PATIENCE_S", 600.0)
    with (
        serving(engine, ServingConfig(max_bodies_bytes=1_500_000)) as site,
        contextlib.ExitStack() as stack,
    ):
        half = HEAD % 5_000_000 + MEDIA + b"A" * 1_000_000
        first, second = (stack.enter_context(connect(site, half)) for _ in range(2))
        found: list[bytes] = []
        wait_for(
            lambda: bool(
                found.append(_received(first) + _received(second)) or b"}}" in b"".join(found)
            )
        )
        assert b"503" in b"".join(found)
        assert b"max_bodies_bytes" in b"".join(found)
        assert site.chat(messages=QUESTION, max_tokens=2)[0] == 200


@pytest.fixture(scope="module")
def longest_ms() -> float:
    """A quarter of what parsing 30 MB of objects would take here, which nobody could run beside:
    a second on a fast machine.
    """
    start = time.perf_counter()
    json.loads(b"[" + b"{}," * 1_000_000 + b"{}]")
    return max(250.0, 1000 * 10 * (time.perf_counter() - start) / 4)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"messages": [' + b"{}," * 10_000_000 + b"{}]}", 400),
        (b'{"messages": [' + b'{"role":"user","content":""},' * 1_000_000 + b"{}]}", 400),
        (b'{"messages": [' + b"{}," * 20_000 + b"{}]}", 400),
        (MEDIA + b"A" * 40_000_000 + b'"}]}', 400),
    ],
    ids=["30 MB of objects", "29 MB of messages", "60 KB of objects", "40 MB of media"],
)
def test_hostile_body_keeps_nobody_waiting(
    engine: LLM, longest_ms: float, body: bytes, status: int
) -> None:
    def longest_beside_it() -> float:
        attack = pool.submit(_post, site, body)
        times = [health_ms(site)]
        while not attack.done():
            times.append(health_ms(site))
        assert attack.result() == status
        return max(times)

    with serving(engine, ServingConfig()) as site, ThreadPoolExecutor(1) as pool:
        # attacker, poller and server share one interpreter here, and the machine others
        assert any(longest_beside_it() < longest_ms for _ in range(3))


def _post(site: Site, body: bytes) -> int:
    """Send all that is taken; the refusal comes while the body is on its way."""
    with connect(site, HEAD % len(body)) as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(body)
        found = re.match(rb"HTTP/1.1 (\d+)", client.recv(4096))
        assert found
        return int(found[1])


def test_connections_beyond_the_cap_replace_the_idlest(engine: LLM) -> None:
    with serving(engine, ServingConfig(max_connections=8)) as site, contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(site, b"GET /health HTTP/1.1\r\n")) for _ in range(8)]
        for _ in range(4):
            assert site.request("GET", "/health")[0] == 200
        assert read_all(held[0]) == b""  # the first that came was cut off
        held[7].sendall(b"Host: x\r\n\r\n")
        assert b"200 OK" in held[7].recv(1000)  # the last was not


def test_connections_beyond_the_cap_are_refused_while_all_are_busy(engine: LLM) -> None:
    with serving(engine, ServingConfig(max_connections=2)) as site, contextlib.ExitStack() as stack:
        body = ask(max_tokens=4000, ignore_eos=True, stream=True)
        for _ in range(2):
            stack.enter_context(connect(site, body)).recv(100)
        assert read_all(connect(site)).startswith(b"HTTP/1.1 503")


def test_flood_of_half_sent_requests_is_few_log_lines(
    engine: LLM, capfd: pytest.CaptureFixture[str]
) -> None:
    from trt_eagle3.serving.log import set_up_log

    root, before = logging.getLogger(), list(logging.getLogger().handlers)
    root.handlers = []
    set_up_log("info")
    root.handlers[0].filters[0]._interval_s = 600.0  # type: ignore[attr-defined]
    try:
        with serving(engine, ServingConfig(header_timeout_s=0.2, max_connections=16)) as site:
            for _ in range(10):
                with contextlib.ExitStack() as stack:
                    for data in (
                        b"\x00\xff\r\n\r\n",
                        b"GET /",
                        HEAD % 100 + b"{",
                        b"GET / HTTP/1.1\r\nUpgrade: x\r\n",
                    ):
                        for _ in range(10):
                            with contextlib.suppress(OSError):
                                stack.enter_context(connect(site, data))
            wait_for(lambda: not site.server.server_state.connections)
            assert site.request("GET", "/health")[0] == 200
    finally:
        root.handlers = before
    assert len(capfd.readouterr().err.splitlines()) < 10


def test_sigterm_does_not_wait_for_half_sent_requests(engine: LLM) -> None:
    with contextlib.ExitStack() as stack:
        with serving(engine) as site:
            for data in (
                b"",
                b"GET /",
                HEAD % 9_000_000 + MEDIA + b"A" * 100_000,
                HEAD % 100 + b"{",
            ):
                for _ in range(5):
                    stack.enter_context(connect(site, data))
            body = stack.enter_context(connect(site, HEAD % 100 + b"{"))
            wait_for(lambda: len(site.server._front._budget._reading) == 11)
            wait_for(lambda: len(site.server.server_state.connections) == 21)
            start = time.monotonic()
        assert time.monotonic() - start < 15, "of half a minute"
        assert b"the server is stopping" in read_all(body)


def test_readers_that_stop_reading_keep_nobody_waiting_and_go_on_later(engine: LLM) -> None:
    """Their sequences are preempted; when they read again, they get the same tokens as if
    nothing had been.
    """
    options = {"max_tokens": 500, "ignore_eos": True, "speculation": False}
    expected = engine.generate(QUESTION, **options)
    with serving(engine, ServingConfig()) as site, contextlib.ExitStack() as stack:
        site.chat(messages=QUESTION)
        body = ask(**options, stream=True)
        stalled = [stack.enter_context(connect(site, body, receive_buffer=2048)) for _ in range(6)]
        wait_for(lambda: engine.metrics().running == 4 and engine.metrics().waiting == 0)
        with ThreadPoolExecutor(6) as pool:
            start = time.monotonic()
            found = list(pool.map(lambda _: site.chat(messages=QUESTION, max_tokens=8), range(6)))
            seconds = time.monotonic() - start
        assert [status for status, _ in found] == [200] * 6
        assert seconds < 30, "of the two minutes after which who reads nothing is cut off"
        for client in stalled[:1]:
            events = [
                line for line in _until_done(client).split(b"\n") if line.startswith(b"data: {")
            ]
            said = [
                json.loads(event[6:])["choices"][0]["delta"].get("content", "") for event in events
            ]
            assert "".join(said) == expected.text
    wait_for(lambda: engine.metrics().kv_pages_used == 0)


def _until_done(client: socket.socket) -> bytes:
    """A streamed answer, its chunks of HTTP joined."""
    data = b""
    while b"[DONE]" not in data:
        block = client.recv(1 << 16)
        assert block, data[-200:]
        data += block
    return re.sub(rb"\r\n[0-9a-f]+\r\n", b"", data)


def test_reader_that_never_reads_again_is_cut_off(engine: LLM) -> None:
    body = ask(max_tokens=4000, ignore_eos=True, speculation=False, stream=True)
    with serving(engine, ServingConfig(send_timeout_s=0.5)) as site:
        before = engine.metrics().requests.get("cancelled", 0)
        with connect(site, body, receive_buffer=2048):
            wait_for(lambda: engine.metrics().requests.get("cancelled", 0) == before + 1)
    wait_for(lambda: engine.metrics().kv_pages_used == 0)


@pytest.fixture(autouse=True)
def _nothing_left(engine: LLM) -> Iterator[None]:
    yield
    wait_for(lambda: engine.metrics().running == engine.metrics().waiting == 0)


def test_file_limit_bounds_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    from trt_eagle3.serving import server

    limits, wanted = [(256, 300)], []
    monkeypatch.setattr(server.resource, "getrlimit", lambda _: limits[0])
    monkeypatch.setattr(server.resource, "setrlimit", lambda _, found: wanted.append(found))
    assert server._within_file_limit(ServingConfig(max_connections=512)).max_connections == 172
    assert wanted == [(300, 300)]
    limits[0] = (4096, 4096)
    assert server._within_file_limit(ServingConfig(max_connections=512)).max_connections == 512


def test_readers_that_stall_in_every_place_give_way_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_MAX_STALL_S", 600.0)
    narrow = load(build_tiny(tmp_path, limits={"max_batch_size": 1, "max_waiting": 1}))
    narrow.start()
    body = ask(max_tokens=900, ignore_eos=True, speculation=False, stream=True)
    with serving(narrow) as site, contextlib.ExitStack() as stack:
        scheduler = narrow._core.scheduler

        def are_stalled(count: int) -> bool:
            places = len(scheduler.running) + len(scheduler.waiting)
            return places == count and scheduler.idle and narrow.metrics().kv_pages_used > 0

        for count in (1, 2):
            stack.enter_context(connect(site, body, receive_buffer=2048))
            wait_for(partial(are_stalled, count))
        assert site.chat(messages=QUESTION, max_tokens=2)[0] == 503
        monkeypatch.setattr(connection, "_MAX_STALL_S", 0.1)
        wait_for(lambda: site.chat(messages=QUESTION, max_tokens=2)[0] == 200)
    narrow.close()
