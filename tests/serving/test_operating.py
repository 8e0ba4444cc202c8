"""What an operator sees of ``serve``: names, ids, logs, warnings, pages of other origins, TLS."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.site import SERVING, Site, serving
from tests.tiny import build_tiny
from tests.waiting import wait_for
from trt_eagle3.decode.llm import LLM, load
from trt_eagle3.decode.metrics import EngineMetrics
from trt_eagle3.decode.request.request import Request
from trt_eagle3.errors import OverloadedError, UserError
from trt_eagle3.serving import ServingConfig
from trt_eagle3.serving.access_log import RequestLog
from trt_eagle3.serving.http_options import HttpOptions
from trt_eagle3.serving.request_guard import checked_hosts
from trt_eagle3.serving.served_model import ServedModel
from trt_eagle3.serving.server import Server
from trt_eagle3.serving.throughput_log import (
    ThroughputLog,
    idle_draft,
    throughput_line,
    useless_steps,
)
from trt_eagle3.serving.tls import tls_context

QUESTION = [{"role": "user", "content": "What is 12 plus 30?"}]
PEMS = Path(__file__).parent / "tls"
TLS = HttpOptions(tls_cert=PEMS / "cert.pem", tls_key=PEMS / "key.pem")
OTHER_KEY = b"""\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgqFIzb2zFYjWGOEbP
96+v6RhNgdBRw803kmqTozQ4OL6hRANCAASSBHGzVobInhe/K4HU6VnSvl2jesZl
7VW1uEA/jYzYYdxsw1AVI22aIHi1otvfwJFGfPnJgMlPVpKd+KKt2GCl
-----END PRIVATE KEY-----
"""
NAMES = HttpOptions(
    names=("first", "org/second"), cors_origins=("https://a.example",), api_key="secret"
)
KEY = {"Authorization": "Bearer secret"}
EVIL = ("evil.example", "127.0.0.1.evil.example:8000", "localhost.evil.example", "")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    limits = {"max_seq_len": 4096, "max_kv_tokens": 8192}
    return build_tiny(tmp_path_factory.mktemp("engines"), limits=limits)


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[LLM]:
    engine = load(bundle, media=SERVING.media())
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def site(engine: LLM) -> Iterator[Site]:
    with serving(engine, http=NAMES) as site:
        yield site


def test_model_answers_to_each_of_its_names(site: Site) -> None:
    listed = json.loads(site.request("GET", "/v1/models", headers=KEY)[1])["data"]
    assert [model["id"] for model in listed] == ["first", "org/second"]
    for name in NAMES.names:
        assert json.loads(site.request("GET", f"/v1/models/{name}", headers=KEY)[1])["id"] == name
        body = {"messages": QUESTION, "model": name, "max_tokens": 1}
        status, text, _ = site.request("POST", "/v1/chat/completions", body, KEY)
        assert (status, json.loads(text)["model"]) == (200, name)
    status, text, _ = site.request("GET", "/v1/models/tiny", headers=KEY)
    assert (status, json.loads(text)["error"]["code"]) == (404, "model_not_found")


def test_version_is_the_packages(site: Site) -> None:
    assert json.loads(site.request("GET", "/version")[1])["version"].count(".") == 2


def test_pages_of_a_listed_origin_may_ask_and_others_may_not(site: Site) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    for origin, allowed in (("https://a.example", True), ("https://b.example", False)):
        headers = {"Origin": origin, **asked}
        status, _, found = site.request("OPTIONS", "/v1/chat/completions", headers=headers)
        assert (status == 200) == allowed
        assert (found.get("access-control-allow-origin") == origin) == allowed
    _, _, found = site.request("GET", "/health", headers={"Origin": "https://a.example"})
    assert found["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize("path", ["/version", "/v1/models", "/nowhere"])
def test_page_may_read_id_and_errors(site: Site, path: str) -> None:
    _, _, found = site.request("GET", path, headers={"Origin": "https://a.example"})
    assert "x-request-id" in found["access-control-expose-headers"].lower()


def test_page_may_read_an_internal_error(
    site: Site, engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(engine, "submit", fail)
    headers = {**KEY, "Origin": "https://a.example"}
    status, text, found = site.request(
        "POST", "/v1/chat/completions", {"messages": QUESTION}, headers
    )
    assert (status, "planted" in text) == (500, False)
    assert found["access-control-allow-origin"] == "https://a.example"
    assert found["x-request-id"].startswith("req_")


def test_id_of_a_request_is_echoed_if_it_can_be(site: Site) -> None:
    for given in ("my-id.7", "x" * 128):
        for path in ("/health", "/v1/models", "/nowhere"):
            _, _, found = site.request("GET", path, headers={"X-Request-Id": given})
            assert found["x-request-id"] == given
    for bad in ("", "x" * 129, "\xe9"):
        _, _, found = site.request("GET", "/health", headers={"X-Request-Id": bad})
        assert found["x-request-id"].startswith("req_")


def test_each_request_is_a_line_but_probes_are_not(
    engine: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "trt_eagle3"), serving(engine) as site:
        site.request("GET", "/health")
        site.request("GET", "/nowhere%0Aforged", headers={"X-Request-Id": "abc"})
        site.request(
            "POST", "/v1/chat/completions", {"messages": QUESTION, "max_tokens": 2, "stream": True}
        )
        wait_for(lambda: len(caplog.records) == 2)
    first, second = (record.getMessage() for record in caplog.records)
    assert "GET /nowhere\\nforged 404" in first
    assert "id=abc" in first
    assert "POST /v1/chat/completions 200" in second


FORGED = "203.0.113.9 GET /v1/models 200 \x1b[2J\u202e" + "x" * 60_000


@pytest.mark.parametrize(
    ("method", "path", "client", "headers", "line"),
    [
        ("A" * 60_000, "/x", "::1", [], f"::1 {'A' * 13}... /x 404 *s 2B id=*"),
        (
            "GET",
            "/a b\x1b[2J\u202e" + "x" * 60_000,
            "::1",
            [(b"x-request-id", b"1 200 9s id=2")],
            f"::1 GET /a%20b\\x1b[2J\\u202e{'x' * 60}... 404 *s 2B id=1%20200%209s%20id=2",
        ),
        (
            "GET",
            "/x",
            FORGED,
            [],
            "203.0.113.9%20GET%20/v1/models%20200%20\\x1b[2J\\u20... GET /x 404 *s 2B id=*",
        ),
    ],
)
def test_each_field_of_a_line_is_one_bounded_printable_word(
    method: str,
    path: str,
    client: str,
    headers: list[tuple[bytes, bytes]],
    line: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404})
        await send({"type": "http.response.body", "body": b"no"})

    async def nowhere(_message: Any = None) -> None:
        """Takes and gives nothing."""

    scope = {
        "type": "http",
        "path": path,
        "method": method,
        "client": (client, 1),
        "headers": headers,
    }
    with caplog.at_level(logging.INFO, "trt_eagle3"):
        asyncio.run(RequestLog(app)(scope, nowhere, nowhere))
    [record] = caplog.records
    assert fnmatchcase(record.getMessage(), line.replace("[", "[[]"))
    assert len(record.getMessage().split(" ")) == 7


@pytest.mark.parametrize(
    ("trusted", "forwarded", "expected"),
    [
        ("", "203.0.113.9", "127.0.0.1"),
        ("10.0.0.0/8", "203.0.113.9", "127.0.0.1"),
        ("10.0.0.0/8, 127.0.0.1", "\x1b[2J, 203.0.113.9, 10.1.2.3", "203.0.113.9"),
        ("*", "203.0.113.9", "203.0.113.9"),
        ("*", "\x9b2J" + "y" * 5000, "\\x9b2J" + "y" * 55 + "..."),
    ],
)
def test_forwarded_address_counts_only_from_a_proxy_that_is_trusted(
    engine: LLM, trusted: str, forwarded: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def submit(request: Request) -> None:
        asked.append(request.client)
        raise OverloadedError("enough")

    monkeypatch.setattr(engine, "submit", submit)
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn's own
    with serving(engine, http=HttpOptions(forwarded_allow_ips=trusted)) as site:
        body, headers = {"messages": QUESTION}, {"X-Forwarded-For": forwarded}
        assert site.request("POST", "/v1/chat/completions", body, headers)[0] == 503
    assert asked == [expected]


def test_prompts_in_the_log_are_one_bounded_line() -> None:
    assert Request("a\x1b[2J\nb" + "c" * 10**5).prompt_text == f"a\\x1b[2J\\nb{'c' * 9986}..."


@pytest.mark.parametrize(
    ("host", "names", "has_key", "answered", "refused"),
    [
        ("127.0.0.1", (), False, ("127.0.0.1", "localhost:80", "[::1]:80", "LocalHost."), EVIL),
        ("127.0.0.2", (), False, ("127.0.0.2:8000", "localhost"), ("127.0.0.3", *EVIL)),
        ("localhost", ("LLM.example.com",), False, ("llm.example.com:80", "localhost"), EVIL),
        ("127.0.0.1", ("*",), False, EVIL, ()),
        ("127.0.0.1", (), True, EVIL, ()),
        ("0.0.0.0", (), False, EVIL, ()),
        ("0.0.0.0", ("llm.example.com",), True, ("llm.example.com", "localhost"), EVIL),
    ],
)
def test_loopback_server_without_a_key_answers_only_for_its_own_hosts(
    engine: LLM,
    host: str,
    names: tuple[str, ...],
    has_key: bool,
    answered: tuple[str, ...],
    refused: tuple[str, ...],
) -> None:
    hosts = checked_hosts(host, names, has_key=has_key)
    with serving(engine, hosts=hosts) as site:
        for name in answered:
            assert site.request("GET", "/v1/models", headers={"Host": name})[0] == 200
        for name in refused:
            for path in ("/v1/models", "/", "/metrics"):
                status, text, _ = site.request("GET", path, headers={"Host": name})
                error = json.loads(text)["error"]
                assert (status, error["code"]) == (421, "host_not_allowed")
                assert "Host: " in error["message"]
                assert "--allow-host-header" in error["message"]


def test_flood_of_requests_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(_message: Any) -> None:
        """Nowhere."""

    log = RequestLog(app)
    scope = {"type": "http", "path": "/x", "method": "GET"}
    with caplog.at_level(logging.INFO, "trt_eagle3"):
        for _ in range(1500):
            with pytest.raises(StopIteration):
                log(dict(scope), send, send).send(None)  # type: ignore[arg-type]
    assert len(caplog.records) == 1000


def moment(**changes: Any) -> EngineMetrics:
    """Metrics of which only what the log reads is filled in."""
    values = {
        "prompt_tokens": 0,
        "generated_tokens": 0,
        "cycles": 0,
        "running": 0,
        "waiting": 0,
        "kv_pages_used": 0,
        "kv_pages_total": 100,
        "accepted": (),
        "proposed": (),
    }
    return SimpleNamespace(**(values | changes))  # type: ignore[return-value]


def test_throughput_is_that_of_the_interval() -> None:
    before = moment(prompt_tokens=100, generated_tokens=50, accepted=(10, 5), proposed=(20, 20))
    now = moment(
        prompt_tokens=300,
        generated_tokens=150,
        running=3,
        waiting=1,
        kv_pages_used=25,
        accepted=(40, 15),
        proposed=(60, 60),
    )
    assert throughput_line(before, now, 10.0) == (
        "prompt 20.0 tokens/s, generated 10.0 tokens/s, running 3, waiting 1, KV cache 25.0% used, "
        "acceptance length 2.00"
    )
    assert throughput_line(now, replace_running(now), 10.0) is None


def replace_running(now: Any) -> Any:
    return SimpleNamespace(**{**vars(now), "running": 0, "waiting": 0})


def test_throughput_is_logged_while_the_engine_works(caplog: pytest.LogCaptureFixture) -> None:
    asked = [moment()]

    def snapshot() -> EngineMetrics:
        asked.append(moment(generated_tokens=5))
        return asked[-2]

    with caplog.at_level(logging.INFO, "trt_eagle3"), ThroughputLog(snapshot, 0.02):
        wait_for(lambda: len(asked) > 5)
    assert len(caplog.records) == 1  # then it is idle


def test_log_says_when_drafting_stops_with_the_reason_and_when_it_begins_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    moments = [
        moment(cycles=cycles, proposed=(drafted,), accepted=(1,))
        for cycles, drafted in [(1, 1), (9, 9), (20, 9), (30, 9), (40, 12)]
    ]

    def snapshot() -> EngineMetrics:
        return moments.pop(0) if len(moments) > 1 else moments[0]

    log = ThroughputLog(snapshot, 0.02, "the reason. The command")
    with caplog.at_level(logging.INFO, "trt_eagle3"), log:
        wait_for(lambda: len(caplog.records) > 1)
    assert [record.getMessage() for record in caplog.records] == [
        "speculation: off, 11 cycles had no draft: the reason. The command",
        "speculation: on again",
    ]


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [((900, 500, 3, 1), "Build with steps: 2"), ((900, 500, 300, 100), None), ((9, 0), None)],
)
def test_steps_that_never_pay_are_named(accepted: tuple[int, ...], expected: str | None) -> None:
    cycles = 1000 if len(accepted) == 4 else 10
    found = useless_steps(moment(accepted=accepted, proposed=(cycles,) * len(accepted)))
    assert found is None if expected is None else expected in (found or "")


@pytest.mark.parametrize(
    ("cycles", "proposed", "warns"),
    [(25_408, (84, 80), True), (25_408, (900,), False), (9_000, (8,), False), (25_408, (), False)],
)
def test_draft_that_hardly_ever_pays_is_named(
    cycles: int, proposed: tuple[int, ...], warns: bool
) -> None:
    found = idle_draft(moment(cycles=cycles, proposed=proposed))
    assert (found is not None and "84 of 25408 cycles drafted" in found) == warns


def test_warning_of_the_draft_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[Any] = []

    def snapshot() -> EngineMetrics:
        asked.append(moment(cycles=20_000, proposed=(8,), accepted=(1,)))
        return asked[-1]

    with caplog.at_level(logging.INFO, "trt_eagle3"), ThroughputLog(snapshot, 0.02):
        wait_for(lambda: len(asked) > 5)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_sampling_is_as_the_checkpoint_says_unless_told_otherwise(
    bundle: Path, engine: LLM
) -> None:
    path = bundle / "processor" / "generation_config.json"
    before = path.read_text()
    try:
        path.write_text(
            json.dumps({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20})
        )
        found = ServedModel.of(engine, ServingConfig()).defaults
        assert (found.temperature, found.top_p, found.top_k) == (0.7, 0.8, 20)
        assert ServedModel.of(engine, ServingConfig(generation_config=False)).defaults.greedy
        path.write_text(json.dumps({"temperature": 0.7, "repetition_penalty": 1.05}))
        found = ServedModel.of(engine, ServingConfig()).defaults
        assert (found.greedy, found.repetition_penalty) == (True, 1.05)
        path.write_text(json.dumps({"do_sample": True, "top_p": 7}))
        with pytest.raises(UserError, match=r"generation_config.json: top_p"):
            ServedModel.of(engine, ServingConfig())
    finally:
        path.write_text(before)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"api_key": ""}, "--api-key: it is empty"),
        ({"names": ("",)}, "--served-model-name: it is empty"),
        ({"cors_origins": ("a.example",)}, "--cors-origin: expected"),
        ({"cors_origins": ("https://a.example/",)}, "--cors-origin: expected"),
        ({"cors_origins": ("https://A.example",)}, "--cors-origin: expected"),
        ({"forwarded_allow_ips": "10.0.0.0/8,proxy"}, "--forwarded-allow-ips: expected addresses"),
        ({"forwarded_allow_ips": "10.0.0.1/8"}, "--forwarded-allow-ips: expected addresses"),
        ({"host_headers": ("https://a.example",)}, "--allow-host-header: expected a host"),
        ({"tls_cert": Path("x")}, "--tls-key: missing"),
        ({"tls_key": Path("x")}, "--tls-cert: missing"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        HttpOptions(**options)


@pytest.mark.parametrize(
    ("cert", "key", "expected"),
    [
        ("absent", "key", "--tls-cert .*absent.pem: No such file or directory. Expected a PEM"),
        ("cert", "absent", "--tls-key .*absent.pem: No such file"),
        (".", "key", "--tls-cert .*: Is a directory"),
        ("key", "cert", "--tls-cert .*key.pem: does not contain a certificate chain"),
        ("cert", "cert", "--tls-key .*cert.pem: does not contain a private key"),
        ("empty", "key", "--tls-cert .*empty.pem: is empty"),
        ("junk", "key", "--tls-cert .*junk.pem: does not contain a certificate"),
        ("cert", "locked", "--tls-key .*locked.pem: has a password. Remove it: openssl"),
        ("cert", "other", "other.pem: not a certificate and its key .*own key"),
        ("broken", "key", "broken.pem, .*: not a certificate and its key"),
    ],
)
def test_bad_pem_files_are_refused_in_one_line(
    tmp_path: Path, cert: str, key: str, expected: str
) -> None:
    files = {
        "cert": (PEMS / "cert.pem").read_bytes(),
        "key": (PEMS / "key.pem").read_bytes(),
        "other": OTHER_KEY,
        "empty": b"\n",
        "junk": bytes(range(256)),
        "locked": OTHER_KEY.replace(b"PRIVATE", b"ENCRYPTED PRIVATE"),
        "broken": b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    }
    for name, data in files.items():
        (tmp_path / f"{name}.pem").write_bytes(data)
    cert_path = tmp_path if cert == "." else tmp_path / f"{cert}.pem"
    with pytest.raises(UserError, match=expected) as caught:
        tls_context(replace(TLS, tls_cert=cert_path, tls_key=tmp_path / f"{key}.pem"))
    assert "\n" not in str(caught.value)


def test_certificate_that_is_over_is_named_at_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("WARNING", "trt_eagle3"):
        assert tls_context(TLS) is not None
        assert not caplog.records
        assert tls_context(replace(TLS, tls_cert=PEMS / "expired.pem")) is not None
    assert "expired.pem: expired, so clients will refuse it" in caplog.text


@contextmanager
def encrypted(engine: LLM, config: ServingConfig) -> Iterator[int]:
    server = Server(engine, config, TLS, tls=tls_context(TLS))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(60)


@pytest.fixture(scope="module")
def tls_port(engine: LLM) -> Iterator[int]:
    with encrypted(engine, ServingConfig(header_timeout_s=60.0, max_connections=8)) as port:
        yield port


@pytest.fixture(scope="module")
def hasty_tls_port(engine: LLM) -> Iterator[int]:
    with encrypted(engine, ServingConfig(header_timeout_s=0.3)) as port:
        yield port


def https(port: int) -> http.client.HTTPSConnection:
    context = ssl.create_default_context(cafile=TLS.tls_cert)
    return http.client.HTTPSConnection("localhost", port, timeout=60, context=context)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_come_over_tls(tls_port: int, engine: LLM, stream: bool) -> None:
    expected = engine.generate(QUESTION).text
    with closing(https(tls_port)) as connection:
        for _ in range(2):  # and the connection is kept
            body = json.dumps({"messages": QUESTION, "stream": stream})
            connection.request("POST", "/v1/chat/completions", body)
            text = connection.getresponse().read().decode()
            if stream:
                events = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
                found = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
            else:
                found = json.loads(text)["choices"][0]["message"]["content"]
            assert found == expected


def test_client_over_tls_that_hangs_up_stops_its_request(tls_port: int, engine: LLM) -> None:
    before = engine.metrics().requests.get("cancelled", 0)
    with closing(https(tls_port)) as connection:
        body = {"messages": QUESTION, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        wait_for(lambda: engine.metrics().running == 1)
    wait_for(lambda: engine.metrics().requests.get("cancelled", 0) == before + 1)
    wait_for(lambda: engine.metrics().running == 0)


@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"])
def test_handshake_that_never_ends_is_cut_off(hasty_tls_port: int, data: bytes) -> None:
    with closing(socket.create_connection(("localhost", hasty_tls_port), 30)) as connection:
        connection.sendall(data)
        while connection.recv(4096):
            pass


def test_handshakes_are_bounded_in_number(tls_port: int) -> None:
    held = [socket.create_connection(("localhost", tls_port), 30) for _ in range(40)]
    try:
        with closing(https(tls_port)) as connection:
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
        assert held[0].recv(1) == b""  # the oldest has gone
    finally:
        for connection in held:
            connection.close()


def test_client_over_tls_that_sends_no_request_is_cut_off(engine: LLM) -> None:
    context = ssl.create_default_context(cafile=TLS.tls_cert)
    with (
        encrypted(engine, ServingConfig(header_timeout_s=1.0)) as port,
        socket.create_connection(("localhost", port), 30) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\n")
        try:
            found = connection.recv(4096)
        except (ssl.SSLError, ConnectionResetError):
            found = b""
        assert found == b""
