"""Structured output, tools and log-probabilities over HTTP: what comes back fits what was asked
for.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.serving.openai.model import SERVING, WEATHER, load_with_tools, sse
from tests.serving.site import Site, serving
from trt_eagle3.decode.llm import LLM
from trt_eagle3.multimodal.tokenizer import TokenBytes

QUESTION = [{"role": "user", "content": "What is 12 plus 30?"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yz"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    engine = load_with_tools(tmp_path_factory.mktemp("tools"), limits={"max_batch_size": 4})
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def site(engine: LLM) -> Iterator[Site]:
    with serving(engine, SERVING) as site:
        yield site


@pytest.fixture(scope="module")
def enough(engine: LLM) -> dict[str, Any]:
    """Tokens for any answer, and no blanks, which the tiny model likes best of all JSON."""
    tokenizer = engine.bundle.processor.tokenizer
    token_bytes = TokenBytes(tokenizer)
    blank = [i for i in range(tokenizer.get_vocab_size()) if not token_bytes(i).strip()]
    return {"max_tokens": 500, "logit_bias": {str(i): -100 for i in blank}}


def check_call(call: dict[str, Any]) -> None:
    assert call["name"] == "weather"
    jsonschema.validate(json.loads(call["arguments"]), WEATHER["function"]["parameters"])


@pytest.mark.parametrize("speculation", [True, False])
def test_answer_fits_its_schema(site: Site, enough: dict[str, Any], speculation: bool) -> None:
    status, found = site.chat(
        messages=QUESTION, response_format=FORMAT, speculation=speculation, **enough
    )
    assert status == 200, found
    [choice] = found["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_choice_and_regex_are_obeyed(site: Site) -> None:
    _, found = site.chat(messages=QUESTION, guided_choice=["maybe", "never"])
    assert found["choices"][0]["message"]["content"] in {"maybe", "never"}
    _, found = site.chat(messages=QUESTION, structured_outputs={"regex": "[A-C]{3}-[0-9]{2}"})
    assert re.fullmatch("[A-C]{3}-[0-9]{2}", found["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_forced_call_fits_its_schema(site: Site, enough: dict[str, Any], choice: Any) -> None:
    body = {"messages": QUESTION, "tools": [WEATHER], "tool_choice": choice, **enough}
    _, found = site.chat(**body, parallel_tool_calls=False)
    [answer] = found["choices"]
    assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
    [call] = answer["message"]["tool_calls"]
    check_call(call["function"])


def test_streamed_call_is_the_whole_one(site: Site, enough: dict[str, Any]) -> None:
    body = {"messages": QUESTION, "tools": [WEATHER], "tool_choice": "required", **enough}
    _, whole = site.chat(**body, parallel_tool_calls=False)
    events = site.events(**body, parallel_tool_calls=False)
    deltas = [e["choices"][0]["delta"].get("tool_calls", []) for e in events]
    parts = [call["function"].get("arguments", "") for calls in deltas for call in calls]
    [call] = whole["choices"][0]["message"]["tool_calls"]
    assert "".join(parts) == call["function"]["arguments"]
    assert len(parts) > 2
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_answer_beside_tools_is_a_call_or_fits_its_schema(
    site: Site, enough: dict[str, Any]
) -> None:
    body = {"messages": QUESTION, "tools": [WEATHER], "response_format": FORMAT, **enough}
    _, found = site.chat(**body)
    message = found["choices"][0]["message"]
    for call in message.get("tool_calls", []):
        check_call(call["function"])
    if "tool_calls" not in message:
        jsonschema.validate(json.loads(message["content"]), SCHEMA)


def test_response_fits_its_format(site: Site, enough: dict[str, Any]) -> None:
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    body = {"input": "What?", "text": text, "logit_bias": enough["logit_bias"]}
    status, found, _ = site.request("POST", "/v1/responses", body)
    assert status == 200
    [item] = json.loads(found)["output"]
    jsonschema.validate(json.loads(item["content"][0]["text"]), SCHEMA)


def test_logprobs_are_those_of_every_token(site: Site, engine: LLM) -> None:
    body = {"messages": QUESTION, "logprobs": True, "top_logprobs": 3}
    _, whole = site.chat(**body)
    content = whole["choices"][0]["logprobs"]["content"]
    expected = engine.generate(QUESTION, logprobs=3)
    assert len(content) == whole["usage"]["completion_tokens"] == len(expected.logprobs)
    assert [e["logprob"] for e in content] == [found.logprob for found in expected.logprobs]
    text = b"".join(bytes(entry["bytes"]) for entry in content).decode()
    assert text.removesuffix("<|im_end|>") == whole["choices"][0]["message"]["content"]
    for entry in content:
        top = [other["logprob"] for other in entry["top_logprobs"]]
        assert top == sorted(top, reverse=True)
        assert len(top) == 3
        assert sum(map(math.exp, top)) <= 1.001
    events = site.events(**body)
    streamed = [e["choices"][0]["logprobs"] for e in events]
    assert [entry for part in streamed if part for entry in part["content"]] == content


def test_completion_has_logprobs_at_their_offsets(site: Site) -> None:
    body = {"prompt": "a", "logprobs": 1, "max_tokens": 6, "ignore_eos": True}
    _, whole, _ = site.request("POST", "/v1/completions", body)
    [choice] = json.loads(whole)["choices"]
    found = choice["logprobs"]
    assert "".join(found["tokens"]).removesuffix("<|im_end|>") == choice["text"]
    assert found["text_offset"] == [
        len("".join(found["tokens"][:i])) for i in range(len(found["tokens"]))
    ]
    _, text, _ = site.request("POST", "/v1/completions", {**body, "stream": True})
    parts = [e["choices"][0]["logprobs"] for e in sse(text)[:-1]]
    assert [o for part in parts if part for o in part["text_offset"]] == found["text_offset"]


def test_biases_penalties_and_least_lengths_reach_the_engine(site: Site, engine: LLM) -> None:
    [token] = engine.bundle.processor.tokenizer.encode("7").ids
    _, found = site.chat(
        messages=QUESTION, logit_bias={str(token): 100}, max_tokens=5, ignore_eos=True
    )
    assert found["choices"][0]["message"]["content"] == "77777"
    body = {"messages": QUESTION, "logit_bias": {str(token): 20}, "max_tokens": 8}
    _, found = site.chat(**body, frequency_penalty=10.0, ignore_eos=True)
    assert found["choices"][0]["message"]["content"] != "7" * 8
    _, found = site.chat(messages=QUESTION, min_tokens=30, max_tokens=40)
    assert found["usage"]["completion_tokens"] >= 30


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no regex": ({"guided_regex": "("}, "guided_regex"),
    "no schema": ({"guided_json": {"type": "strin"}}, "guided_json"),
    "endless reference": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
        "response_format",
    ),
    "reference to nowhere": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/a"}}}},
        "response_format",
    ),
    "contradiction": (
        {"guided_json": {"type": "integer", "minimum": 5, "maximum": 4}},
        "guided_json",
    ),
    "backwards": ({"guided_regex": "(a)\\1"}, "guided_regex"),
    "unknown rule": ({"guided_grammar": "start: x"}, "guided_grammar"),
    "large schema": (
        {"guided_json": {"type": "object", "description": "x" * 300_000}},
        "guided_json",
    ),
    "pattern of a tool": (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "parameters": {
                            "type": "object",
                            "properties": {"a": {"type": "string", "pattern": "("}},
                        },
                    },
                }
            ],
            "tool_choice": "required",
        },
        "tools",
    ),
    "too many logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "recursive without end": (
        {
            "guided_json": {
                "type": "object",
                "properties": {"a": {"$ref": "#"}},
                "required": ["a"],
            }
        },
        "guided_json",
    ),
    "image that is none": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}],
                }
            ]
        },
        "messages",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_no_answer_could_fit_is_refused_by_its_field(site: Site, name: str) -> None:
    body, param = BAD[name]
    start = time.monotonic()
    status, found = site.chat(**{"messages": QUESTION, **body})
    assert (status, found["error"]["param"]) == (400, param), found
    assert time.monotonic() - start < 20  # a second, on a machine with nothing else to do


def test_others_are_answered_while_a_grammar_is_compiled(site: Site, engine: LLM) -> None:
    regex, stop = "((a{1,999}b?){1,999}c?){1,999}", threading.Event()

    def attack() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            status, _ = site.chat(messages=QUESTION, guided_regex=f"{regex}{number}", max_tokens=2)
            assert status in {200, 400}

    attacker = threading.Thread(target=attack)
    attacker.start()
    try:
        expected = engine.generate(QUESTION).text
        for _ in range(5):
            _, found = site.chat(messages=QUESTION)
            assert found["choices"][0]["message"]["content"] == expected
    finally:
        stop.set()
        attacker.join()
