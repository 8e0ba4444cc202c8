"""Bodies of every route, changed at random: a bad one is a 400, never a failure of the server."""

from __future__ import annotations

import copy
import http.client
import json
import random
from collections.abc import Iterator
from typing import Any

from tests.serving.openai.model import WEATHER
from tests.serving.site import Site
from tests.tiny import ROOT
from tests.triton.server import data_uri

SEED, COUNT = 39, 250
LIMITS = ("max_tokens", "max_output_tokens", "n")
URI = data_uri((ROOT / "examples/tiny/images/scene.png").read_bytes())
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/c"}},
    "required": ["a"],
    "$defs": {"c": {"enum": ["x", 1, None]}},
}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CHAT = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": "1", "content": "12"},
        {"role": "user", "content": "And?"},
    ],
    "max_tokens": 1,
}
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "seed": 1,
    "n": 1,
    "stop": ["a"],
    "stop_token_ids": [5],
    "logit_bias": {"5": 1},
    "min_tokens": 0,
    "stream_options": {"include_usage": True},
    "metadata": {"a": "b"},
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
ITEM = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**CHAT, **SAMPLING}),
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL, WEATHER], "tool_choice": "required"}),
    ("/v1/chat/completions", {**CHAT, "response_format": FORM}),
    ("/v1/chat/completions", {**CHAT, "structured_outputs": {"choice": ["a", "b"]}}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": URI}}]}
            ],
            "max_tokens": 1,
            "chat_template_kwargs": {"thinking": False},
            "logprobs": True,
            "top_logprobs": 1,
        },
    ),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1, "logprobs": 1, "echo": True, **SAMPLING}),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "x", "text": "Hm."}]},
                ITEM,
                {"type": "function_call_output", "call_id": "1", "output": "12"},
            ],
            "instructions": "Be brief.",
            "tools": [{"type": "function", **TOOL["function"]}],  # type: ignore[dict-item]
            "tool_choice": {"type": "function", "name": "f"},
            "max_output_tokens": 1,
            "reasoning": {"effort": "low"},
            "include": [],
            "metadata": {"a": "b"},
        },
    ),
    ("/v1/responses", {"input": "a", "max_output_tokens": 1, "text": {"format": {**FORM}}}),
    ("/tokenize", {"messages": CHAT["messages"], "tools": [TOOL], "return_token_strs": True}),
    ("/tokenize", {"prompt": "a"}),
    ("/detokenize", {"tokens": [1, 2]}),
]
NAN = "\x00NaN\x00"  # written as a number, which Python's writer of JSON would not do
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 5, 1.5, -0.0, 1e308, 10**400, -(2**63), 2**64),
    *("", "a", "5", "\x00", "\ue0001\ue001", "<|im_end|>", "é🙂", "{", "a" * 5000, NAN),
    *([], [[]], [None], [5], ["a"], [{}], {}, {"": None}, {"a": {}}, {"type": 5}, {"$ref": []}),
    *({"type": "x"}, {"role": []}, {"$ref": "#"}, {"anyOf": []}, {"url": 5}, {"name": "f"}),
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each object or list inside ``value``, with each of its keys or indices."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        if key in LIMITS:  # else answers are long
            continue
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def mutated(body: dict[str, Any], draw: random.Random) -> bytes:
    body = copy.deepcopy(body)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        found = list(places(body))
        if not found:
            break
        holder, key = draw.choice(found)
        kind = draw.random()
        if kind < 0.7:
            holder[key] = copy.deepcopy(draw.choice(VALUES))
        elif kind < 0.8:
            del holder[key]
        elif kind < 0.9 and isinstance(holder, dict):
            holder[str(draw.choice(VALUES))[:20]] = copy.deepcopy(draw.choice(VALUES))
        else:
            other, inside = draw.choice(found)
            holder[key] = copy.deepcopy(other[inside])
    return json.dumps(body).replace(json.dumps(NAN), draw.choice(["NaN", "1e999"])).encode()


def test_mutated_bodies_never_fail_the_server(site: Site) -> None:
    draw = random.Random(SEED)
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=60)
    taken = 0
    for _ in range(COUNT):
        path, body = draw.choice(BODIES)
        data = mutated(body, draw)
        connection.request("POST", path, data)
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status in {200, 400, 404, 413}, (path, data[:2000], text)
        if answer.status == 400:
            assert json.loads(text)["error"]["type"] == "invalid_request_error"
        taken += answer.status == 200
    connection.close()
    assert COUNT // 20 < taken < COUNT, "some are sound, most are not"
