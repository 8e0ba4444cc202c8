"""``trt-eagle3 serve`` over real HTTP: OpenAI's protocol, and the same answers as ``generate``."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.multimodal.bombs import encode, endless_jpeg
from tests.serving.site import SERVING, Site, serving
from tests.tiny import ROOT, build_tiny
from tests.triton.hostile import REFUSED
from tests.triton.server import data_uri
from tests.waiting import wait_for
from trt_eagle3.decode.llm import LLM, load
from trt_eagle3.decode.sampling.grammar_compiler import GrammarCompiler
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.serving import ServingConfig
from trt_eagle3.serving.app import Front, make_app
from trt_eagle3.serving.warm_up import warm_up

ENDLESS = data_uri(endless_jpeg(), "image/jpeg")
SCENE = ROOT / "examples/tiny/images/scene.png"
TOOL = {"type": "function", "function": {"name": "f"}}
QUESTION = [{"role": "user", "content": "What is 12 plus 30?"}]
# runs for ten seconds and more, also on a fast machine: for who is to hang up
LONG = {"messages": QUESTION, "max_tokens": 4000, "ignore_eos": True}
LIMITS = {"max_seq_len": 4096, "max_kv_tokens": 8192}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    limits = {**LIMITS, "max_batch_size": 4, "max_waiting": 4}
    return build_tiny(tmp_path_factory.mktemp("engines"), limits=limits)


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[LLM]:
    engine = load(bundle, media=SERVING.media())
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """One request at a time, two in the queue."""
    limits = {**LIMITS, "max_batch_size": 1, "max_waiting": 2}
    engine = load(
        build_tiny(tmp_path_factory.mktemp("narrow"), limits=limits), media=SERVING.media()
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def site(engine: LLM) -> Iterator[Site]:
    with serving(engine) as site:
        yield site


def cancelled(engine: LLM) -> int:
    return engine.metrics().requests.get("cancelled", 0)


def picture(url: str) -> list[dict[str, Any]]:
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What do you see?"},
    ]
    return [{"role": "user", "content": parts}]


def test_answer_and_usage_equal_generate(site: Site, engine: LLM) -> None:
    messages = picture(data_uri(SCENE.read_bytes()))
    expected = engine.generate(messages)
    status, found = site.chat(messages=messages, model="tiny")
    assert status == 200
    assert found["object"] == "chat.completion"
    [choice] = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text}
    assert choice["finish_reason"] == "stop"
    assert found["usage"]["prompt_tokens"] == expected.prompt_tokens
    assert found["usage"]["completion_tokens"] == len(expected.token_ids)
    assert found["usage"]["acceptance_length"] == pytest.approx(expected.acceptance_length)
    plain = site.chat(messages=messages, model="tiny", speculation=False)[1]
    assert plain["usage"]["acceptance_length"] is None


def test_usage_has_the_timings_of_one_answer_and_none_of_several(site: Site) -> None:
    timings = "tokens_per_second", "time_to_first_token_ms"
    usage = site.chat(messages=QUESTION)[1]["usage"]
    assert all(usage[name] > 0 for name in timings)
    *_, last = site.events(messages=QUESTION, stream_options={"include_usage": True})
    assert all(last["usage"][name] > 0 for name in timings)
    usage = site.chat(messages=QUESTION, n=2)[1]["usage"]
    assert [usage[name] for name in timings] == [None, None]


def test_stream_equals_generate(site: Site, engine: LLM) -> None:
    expected = engine.generate(QUESTION)
    first, *pieces, usage = site.events(messages=QUESTION, stream_options={"include_usage": True})
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(p["choices"][0]["delta"].get("content", "") for p in pieces) == expected.text
    assert [p["choices"][0]["finish_reason"] for p in pieces] == [None] * (len(pieces) - 1) + [
        "stop"
    ]
    assert usage["choices"] == []
    assert [event["usage"] for event in (first, *pieces)] == [None] * (len(pieces) + 1)
    assert all("usage" not in event for event in site.events(messages=QUESTION))
    assert usage["usage"]["total_tokens"] == expected.prompt_tokens + len(expected.token_ids)
    assert len({event["id"] for event in (first, *pieces, usage)}) == 1


def test_pieces_say_something(site: Site, engine: LLM) -> None:
    body = {"messages": QUESTION, "stop": "12 plus 30 equals 43", "speculation": False}
    _, *pieces, last = site.events(**body)
    assert all(piece["choices"][0]["delta"]["content"] for piece in pieces)
    said = "".join(event["choices"][0]["delta"].get("content", "") for event in (*pieces, last))
    assert said == engine.generate(QUESTION).text


def test_options_reach_the_engine(site: Site) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        _, found = site.chat(messages=QUESTION, **{name: 3}, ignore_eos=True)
        assert found["usage"]["completion_tokens"] == 3
        assert found["choices"][0]["finish_reason"] == "length"
    # the newer name counts
    _, found = site.chat(messages=QUESTION, max_tokens=9, max_completion_tokens=4)
    assert found["usage"]["completion_tokens"] == 4
    _, found = site.chat(messages=QUESTION, stop="equals")
    assert found["choices"][0]["message"]["content"] == "12 plus 30 "
    sampled = {"messages": QUESTION, "temperature": 1.5, "seed": 4, "max_tokens": 20}
    assert site.chat(**sampled)[1]["choices"] == site.chat(**sampled)[1]["choices"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{", "not JSON"),
        (b"[" * 10_000, "nested deeper than 64 levels"),
        (b"\xff", "not JSON"),
        ([], "body"),
        ({}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages"),
        ({"messages": []}, ""),
        ({"messages": None}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages: role"),
        ({"messages": [{"role": "critic", "content": "hi"}]}, "messages: role"),
        ({"messages": [{"role": 5, "content": "hi"}]}, "messages: role"),
        ({"messages": QUESTION, "n": 0}, "n: expected from 1 to 16, got 0"),
        ({"messages": QUESTION, "n": 17}, "n: expected from 1 to 16, got 17"),
        ({"messages": QUESTION, "tools": [{"type": "function"}]}, "tools[0].function: expected"),
        ({"messages": QUESTION, "tools": {}}, "tools: expected a list"),
        ({"messages": QUESTION, "tools": [TOOL, TOOL]}, "is the name of tools[0] too"),
        ({"messages": QUESTION, "tools": [TOOL]}, "tools: the checkpoint's chat template leaves"),
        ({"messages": QUESTION, "tool_choice": "required"}, "tool_choice: expected tools"),
        ({"messages": QUESTION, "tool_choice": "f"}, "tool_choice: expected auto, none, required"),
        ({"messages": QUESTION, "functions": [{}]}, "functions: expected [], got [{}]."),
        (
            {"messages": QUESTION, "function_call": {"name": "f"}},
            "function_call: expected 'none' or 'auto'",
        ),
        ({"messages": QUESTION, "logprobs": 5}, "logprobs: expected true or false"),
        ({"messages": QUESTION, "top_logprobs": 2}, "top_logprobs: needs logprobs: true"),
        ({"messages": QUESTION, "logprobs": True, "top_logprobs": 21}, "top_logprobs: expected"),
        ({"messages": QUESTION, "prompt_logprobs": 21}, "prompt_logprobs: "),
        ({"messages": QUESTION, "logit_bias": {"a": 1}}, "logit_bias: expected token ids"),
        ({"messages": QUESTION, "logit_bias": {"5": 101}}, "logit_bias[5]: expected a number"),
        (
            {"messages": QUESTION, "logit_bias": {"99999": 1}},
            "logit_bias: expected token ids from 0",
        ),
        (
            {"messages": QUESTION, "stop_token_ids": [99999]},
            "stop_token_ids: expected token ids from",
        ),
        ({"messages": QUESTION, "stop_token_ids": [-1]}, "stop_token_ids: expected token ids from"),
        ({"messages": QUESTION, "response_format": {"type": "yaml"}}, "response_format.type"),
        ({"messages": QUESTION, "response_format": {"type": "json_schema"}}, "response_format"),
        ({"messages": QUESTION, "frequency_penalty": 1000.0}, "frequency_penalty: expected"),
        ({"messages": QUESTION, "min_tokens": -1}, "min_tokens: expected"),
        ({"messages": QUESTION, "audio": {}}, "audio: expected nothing, got {}."),
        ({"messages": QUESTION, "chat_template_kwargs": {"a": []}}, "chat_template_kwargs.a"),
        ({"messages": QUESTION, "max_tokens": 0}, "max_tokens"),
        ({"messages": QUESTION, "max_tokens": "nine"}, "max_tokens"),
        ({"messages": QUESTION, "temperature": -1}, "temperature"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature"),
        ({"messages": QUESTION, "stop": [""]}, "stop"),
        ({"messages": QUESTION, "stop": ["x"] * 65}, "stop: 65 of them, the limit is 64"),
        ({"messages": QUESTION, "stop": ["y", "x" * 1025]}, "stop: a text of 1025 characters"),
        ({"messages": QUESTION, "stop_token_ids": [1] * 65}, "stop_token_ids: 65 of them"),
        ({"messages": picture("/etc/passwd")}, "files are not read"),
        ({"messages": picture("file:///etc/passwd")}, "files are not read"),
        ({"messages": picture("http://169.254.169.254/")}, "not fetched"),
        ({"messages": picture("data:image/png;base64,AAAA")}, "unknown image format"),
        ({"messages": picture("data:image/png;base64,AAAA") * 5}, "the limit is 4"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not Unicode"),
        (b'{"messages": [], "\\ud800\\n": 1}', "not Unicode"),
        (b'{"messages": [], "model": "\\ud800\\n", "stop": 5}', "not Unicode"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_body_is_a_400_of_one_line(site: Site, body: Any, expected: str, stream: bool) -> None:
    if isinstance(body, dict):
        body = {**body, "stream": stream}
    status, text, _ = site.request("POST", "/v1/chat/completions", body)
    assert (status, expected in text) == (400, True), text
    error = json.loads(text)["error"]
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]
    if isinstance(body, dict) and re.match(r"[a-z_]+\b", expected) and ":" in expected:
        assert error["param"] == expected.partition(":")[0]


@pytest.mark.parametrize(
    "extra",
    [
        dict.fromkeys(
            (
                "model",
                "max_tokens",
                "temperature",
                "top_p",
                "stop",
                "stream",
                "stream_options",
                "tools",
            )
        ),
        {
            "n": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "logit_bias": {},
            "logprobs": False,
            "top_logprobs": 0,
        },
        {
            "response_format": {"type": "text"},
            "tool_choice": "none",
            "parallel_tool_calls": True,
            "top_k": -1,
        },
        {"tools": [], "tool_choice": "auto", "functions": [], "function_call": "auto"},
        {
            "user": "me",
            "metadata": {"a": "b"},
            "store": True,
            "service_tier": "auto",
            "prompt_cache_key": "x",
        },
    ],
)
def test_fields_that_change_nothing_are_taken(
    site: Site, engine: LLM, extra: dict[str, Any]
) -> None:
    status, found = site.chat(messages=QUESTION, **extra)
    assert status == 200, found
    assert found["choices"][0]["message"]["content"] == engine.generate(QUESTION).text


def test_developer_is_what_was_called_system(site: Site) -> None:
    said = [
        site.chat(messages=[{"role": role, "content": "?"}, *QUESTION])[1]
        for role in ("developer", "system")
    ]
    assert said[0]["usage"]["prompt_tokens"] == said[1]["usage"]["prompt_tokens"]
    assert said[0]["choices"] == said[1]["choices"]


def test_answer_without_a_limit_goes_on_to_the_end_of_the_context(tmp_path: Path) -> None:
    engine = load(build_tiny(tmp_path, limits={"max_seq_len": 160}))
    with serving(engine) as site:
        _, found = site.chat(messages=QUESTION, ignore_eos=True)
    engine.close()
    assert found["usage"]["total_tokens"] == 160
    assert found["choices"][0]["finish_reason"] == "length"


def test_what_is_not_here_is_a_404_that_clients_can_read(site: Site) -> None:
    status, found = site.chat(messages=QUESTION, model="gpt")
    assert (status, found["error"]["code"]) == (404, "model_not_found")
    status, text, _ = site.request("POST", "/chat/completions", {})
    assert (status, "/v1/chat/completions" in json.loads(text)["error"]["message"]) == (404, True)
    status, text, headers = site.request("GET", "/v1/chat/completions")
    assert (status, headers["allow"]) == (405, "POST")
    assert json.loads(text)["error"]["type"] == "invalid_request_error"


def test_images_that_triton_refuses_are_refused_here(site: Site) -> None:
    found = [
        r["image_url"]
        for r, _ in REFUSED.values()
        if isinstance(r, dict) and "text_input" in r and "image_url" in r
    ]
    urls = [url for url in found if isinstance(url, str)]
    assert len(urls) > 20
    for url in urls:
        status, text, _ = site.request("POST", "/v1/chat/completions", {"messages": picture(url)})
        assert status in {400, 413}, text


def test_big_body_is_refused_while_it_comes(site: Site) -> None:
    status, text, _ = site.request(
        "POST", "/v1/chat/completions", b" " * (SERVING.max_body_bytes + 1)
    )
    assert status == 413
    assert "the limit" in text or "more than" in text


def test_too_large_schema_is_refused_by_its_field(site: Site) -> None:
    schema = {"schema": {"enum": list(range(70_000))}, "name": "s"}
    wanted = {"type": "json_schema", "json_schema": schema}
    status, found = site.chat(messages=QUESTION, response_format=wanted)
    error = found["error"]
    assert (status, error["param"]) == (400, "response_format")
    assert error["code"] == "request_too_large"
    assert "more than 65536 values" in error["message"]


def test_too_long_text_is_refused_by_its_field(engine: LLM) -> None:
    with serving(engine, SERVING.model_copy(update={"max_text_bytes": 5000})) as site:
        status, found = site.chat(messages=QUESTION, stop=["x" * 6000])
    assert (status, found["error"]["param"]) == (400, "stop")


def test_overload_is_a_503_that_says_when_to_come_back(narrow: LLM) -> None:
    with serving(narrow) as site, ThreadPoolExecutor(2) as pool:
        with site.hang_up_later(LONG):
            wait_for(lambda: narrow.metrics().running == 1)
            waiting = [pool.submit(site.chat, messages=QUESTION) for _ in range(2)]
            wait_for(lambda: narrow.metrics().waiting == 2)
            status, text, headers = site.request(
                "POST", "/v1/chat/completions", {"messages": QUESTION}
            )
            assert (status, headers["retry-after"]) == (503, "1")
            assert "max_waiting" in json.loads(text)["error"]["message"]
        assert [answer.result()[0] for answer in waiting] == [200, 200]


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_hangs_up_while_it_waits_leaves_its_place_to_others(
    narrow: LLM, stream: bool
) -> None:
    with serving(narrow) as site, site.hang_up_later(LONG):
        wait_for(lambda: narrow.metrics().running == 1)
        with (
            site.hang_up_later({**LONG, "stream": stream}),
            site.hang_up_later({**LONG, "stream": stream}),
        ):
            wait_for(lambda: narrow.metrics().waiting == 2)
        wait_for(lambda: narrow.metrics().waiting == 0)
        assert narrow.metrics().running == 1


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_hangs_up_stops_its_request(
    site: Site, engine: LLM, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = cancelled(engine)
    with site.hang_up_later({**LONG, "stream": stream}):
        wait_for(lambda: engine.metrics().running == 1)
    wait_for(lambda: cancelled(engine) == before + 1)
    wait_for(lambda: engine.metrics().kv_pages_used == 0)
    assert caplog.text == ""


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_hangs_up_stops_each_of_its_answers(
    site: Site, engine: LLM, stream: bool
) -> None:
    before = cancelled(engine)
    with site.hang_up_later({**LONG, "stream": stream, "n": 3, "temperature": 1.0}):
        wait_for(lambda: engine.metrics().running == 3)
    wait_for(lambda: cancelled(engine) == before + 3)
    wait_for(lambda: engine.metrics().kv_pages_used == 0)


def test_answers_that_do_not_all_fit_are_refused_together(narrow: LLM) -> None:
    with serving(narrow) as site:
        status, text, _ = site.request(
            "POST", "/v1/chat/completions", {**LONG, "n": 4, "temperature": 1.0}
        )
        assert (status, "max_waiting" in text) == (503, True)
        wait_for(lambda: narrow.metrics().running == narrow.metrics().waiting == 0)


def test_every_accepted_request_is_counted_once(narrow: LLM) -> None:
    with serving(narrow) as site:
        site.chat(messages=QUESTION)  # one at a time: what other tests left behind has ended
        before = narrow.metrics().requests
        with site.hang_up_later({**LONG, "stream": True}):
            wait_for(lambda: narrow.metrics().running == 1)
        wait_for(lambda: narrow.metrics().running == 0)
        site.chat(messages=QUESTION)
        site.events(messages=QUESTION)
        site.chat(messages=QUESTION, max_tokens=2)
        site.chat(messages=picture("data:image/png;base64,AAAA"))
        site.chat(messages=QUESTION, n=0)  # refused at the door
    after = narrow.metrics().requests
    grown = {outcome: count - before.get(outcome, 0) for outcome, count in after.items()}
    assert grown == {"cancelled": 1, "stop": 2, "length": 1, "rejected": 2}


def test_request_that_takes_too_long_is_ended(engine: LLM) -> None:
    with serving(engine, ServingConfig(max_request_s=0.2)) as site:
        status, text, _ = site.request("POST", "/v1/chat/completions", LONG)
        assert status == 504
        assert "0.2 s" in text
        for n in (1, 2):
            body = {**LONG, "stream": True, "n": n}
            _, text, _ = site.request("POST", "/v1/chat/completions", body)
            assert "0.2 s" in text
            assert "[DONE]" not in text


def test_request_whose_image_decodes_slowly_is_ended_in_time(bundle: Path) -> None:
    """The issue's case: ``max_request_s`` was 10, and the answer came after 46."""
    config = ServingConfig(max_request_s=1.0)
    engine = load(bundle, media=replace(config.media(), max_jpeg_scans=None))
    with serving(engine, config) as site:
        site.chat(messages=picture(data_uri(encode(Image.new("RGB", (64, 64))))), max_tokens=1)
        start = time.monotonic()
        status, found = site.chat(messages=picture(ENDLESS))
        assert (status, found["error"]["code"]) == (504, "timeout")
        assert time.monotonic() - start < 8, "of half a minute or more"
    engine.close()


def test_image_of_many_scans_is_refused(site: Site) -> None:
    status, found = site.chat(messages=picture(ENDLESS))
    assert status == 400
    assert "a JPEG of 20000 scans, the limit is 100" in found["error"]["message"]


def test_client_that_does_not_read_loses_its_place_in_time(engine: LLM) -> None:
    app, before, sent = (
        make_app(Front(engine, ServingConfig(max_request_s=0.5))),
        cancelled(engine),
        [],
    )

    async def ask() -> None:
        news = iter(
            [{"type": "http.request", "body": json.dumps({**LONG, "stream": True}).encode()}]
        )
        full = asyncio.Event()

        async def receive() -> Any:
            return next(news, None) or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            await full.wait()

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": [],
            "query_string": b"",
        }
        asked = asyncio.create_task(app(scope, receive, send))
        await asyncio.to_thread(wait_for, lambda: cancelled(engine) == before + 1)
        full.set()
        await asked

    asyncio.run(ask())
    assert b"longer than 0.5 s" in b"".join(sent)


def test_key_is_asked_for(engine: LLM) -> None:
    with serving(engine, api_key="s\xe9cret") as site:
        for path, method in (("/v1/models", "GET"), ("/v1/chat/completions", "POST")):
            assert site.request(method, path)[0] == 401
            for wrong in ("Bearer wrong", "s\xe9cret", "Basic s\xe9cret", "Bearer", ""):
                given = {"Authorization": wrong.encode().decode("latin-1")}
                assert site.request(method, path, headers=given)[0] == 401
        for scheme in ("Bearer", "bearer", "BEARER", "bEaReR "):
            given = {"Authorization": f"{scheme} s\xe9cret".encode().decode("latin-1")}
            assert site.request("GET", "/v1/models", headers=given)[0] == 200
        assert site.request("GET", "/health")[0] == 200


def test_models_health_and_metrics(site: Site) -> None:
    site.chat(messages=QUESTION)
    [model] = json.loads(site.request("GET", "/v1/models")[1])["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", LIMITS["max_seq_len"])
    assert site.request("GET", "/health")[:2] == (200, "ok")
    _, text, headers = site.request("GET", "/metrics")
    assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "# TYPE trt_eagle3_time_to_first_token_seconds histogram" in text
    assert re.findall(r"^trt_eagle3_kv_pages_used\S* (.*)$", text, re.MULTILINE) == ["0.0"]
    accept = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
    _, text, headers = site.request("GET", "/metrics", headers=accept)
    assert headers["content-type"].startswith("application/openmetrics-text; version=1.0.0;")
    assert text.endswith("# EOF\n")


def test_engine_that_has_stopped_is_not_healthy(bundle: Path) -> None:
    engine = load(bundle)
    with serving(engine) as site:
        assert site.chat(messages=QUESTION)[0] == site.request("GET", "/health")[0] == 200
        engine.close()
        assert site.request("GET", "/health")[0] == 503
        assert site.chat(messages=QUESTION)[0] == 503


def test_limits_are_checked() -> None:
    with pytest.raises(UserError, match="max_pixls: unknown"):
        ServingConfig.from_mapping({"max_pixls": 3}, "--set")
    with pytest.raises(UserError, match="--set: max_pixels: expected 4096 or more, got 100"):
        ServingConfig.from_mapping({"max_pixels": 100}, "--set")


def test_fewest_pixels_that_may_be_asked_for_are_enough_to_start(bundle: Path) -> None:
    engine = load(bundle, media=ServingConfig(max_pixels=4096).media())
    assert warm_up(engine) > 0
    engine.close()


def test_warm_up_starts_the_process_that_tries_grammars(bundle: Path) -> None:
    with load(bundle) as engine:
        warm_up(engine)
        [process] = engine.bundle.grammars._worker._all
        assert process.poll() is None
    assert process.poll() is not None


def test_server_without_grammars_answers_all_the_same(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: GrammarCompiler) -> None:
        raise EnvironmentMissingError("grammar: cannot start python3")

    monkeypatch.setattr(GrammarCompiler, "warm_up", fail)
    with load(bundle) as engine, caplog.at_level("WARNING", "trt_eagle3"):
        assert warm_up(engine) > 0
    assert "grammar will be refused: grammar: cannot start python3" in caplog.text


def test_image_of_an_allowed_host_is_fetched(bundle: Path, engine: LLM) -> None:
    pages = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Pages, directory=str(SCENE.parent)))
    thread = threading.Thread(
        target=pages.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    host = f"127.0.0.1:{pages.server_address[1]}"
    config = ServingConfig(allowed_hosts=(host,))
    other = load(bundle, media=config.media())
    try:
        with serving(other, config) as site:
            status, found = site.chat(messages=picture(f"http://{host}/scene.png"))
            assert status == 200
            expected = engine.generate(picture(data_uri(SCENE.read_bytes())))
            assert found["choices"][0]["message"]["content"] == expected.text
            assert site.chat(messages=picture(f"http://{host}/absent.png"))[0] == 400
            status, found = site.chat(
                messages=picture(f"http://localhost:{pages.server_address[1]}/scene.png")
            )
            assert status == 400
            assert (
                f"'localhost', port {pages.server_address[1]}, is not in allowed_hosts"
                in found["error"]["message"]
            )
    finally:
        other.close()
        pages.shutdown()
        pages.server_close()


class _Pages(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Silence."""
