"""Keys that nothing reads are named at every depth, or refused where fields are strict."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving.openai.model import SERVING, WEATHER
from tests.serving.site import Site
from tests.tiny import ROOT
from tests.triton.server import data_uri
from trt_eagle3.errors import UserError
from trt_eagle3.serving import ServingConfig
from trt_eagle3.serving.openai.chat import read_chat
from trt_eagle3.serving.openai.completions import read_completion
from trt_eagle3.serving.openai.responses import read_response
from trt_eagle3.serving.openai.tokens import read_tokenize
from trt_eagle3.serving.served_model import ServedModel

URI = data_uri((ROOT / "examples/tiny/images/scene.png").read_bytes())
STRICT = ServingConfig(strict_fields=True)
FUNCTION = WEATHER["function"]
READERS: dict[str, Any] = {
    "chat": read_chat,
    "completion": read_completion,
    "response": read_response,
    "tokenize": read_tokenize,
}


def user(*parts: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts) or "hi", **more}]


def called(call: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [*user(), {"role": "assistant", "content": None, "tool_calls": [call], **more}]


CASES = [
    ("chat", {"messages": user(), "stream_options": {"foo": 1}}, "stream_options.foo"),
    ("chat", {"messages": user(foo=1)}, "messages[0].foo"),
    ("chat", {"messages": user(name="Ann")}, "messages[0].name"),
    (
        "chat",
        {"messages": user({"type": "text", "text": "a", "cache_control": {"type": "x"}})},
        "messages[0].content[0].cache_control",
    ),
    (
        "chat",
        {"messages": user({"type": "image_url", "image_url": {"url": URI, "foo": 5}})},
        "messages[0].content[0].image_url.foo",
    ),
    (
        "chat",
        {"messages": called({"function": {"name": "f", "arguments": "{}"}, "foo": 1})},
        "messages[1].tool_calls[0].foo",
    ),
    (
        "chat",
        {"messages": called({"function": {"name": "f", "arguments": "{}", "foo": 1}})},
        "messages[1].tool_calls[0].function.foo",
    ),
    ("chat", {"messages": user(), "tools": [{**WEATHER, "foo": 1}]}, "tools[0].foo"),
    (
        "chat",
        {"messages": user(), "tools": [{"type": "function", "function": {**FUNCTION, "foo": 1}}]},
        "tools[0].function.foo",
    ),
    (
        "chat",
        {
            "messages": user(),
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "weather", "foo": 1}},
        },
        "tool_choice.function.foo",
    ),
    (
        "chat",
        {
            "messages": user(),
            "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "foo": 1}},
        },
        "response_format.json_schema.foo",
    ),
    ("chat", {"messages": user(), "chat_template_kwargs": {"foo": 1}}, "chat_template_kwargs.foo"),
    (
        "tokenize",
        {"messages": user(), "chat_template_kwargs": {"messages": 1}},  # the template's own
        "chat_template_kwargs.messages",
    ),
    (
        "completion",
        {"prompt": "a", "response_format": {"type": "text", "foo": 1}},
        "response_format.foo",
    ),
    ("response", {"input": user(foo=1)}, "input[0].foo"),
    (
        "response",
        {"input": user({"type": "input_text", "text": "a", "foo": 1})},
        "input[0].content[0].foo",
    ),
    (
        "response",
        {"input": user({"type": "input_image", "image_url": URI, "file_id": "x"})},
        "input[0].content[0].file_id",
    ),
    (
        "response",
        {"input": [{"type": "reasoning", "encrypted_content": "x"}, *user()]},
        "input[0].encrypted_content",
    ),
    (
        "response",
        {"input": "a", "tools": [{"type": "function", **FUNCTION, "foo": 1}]},
        "tools[0].foo",
    ),
    ("response", {"input": "a", "text": {"foo": 1}}, "text.foo"),
    ("response", {"input": "a", "reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ("response", {"input": "a", "include": ["reasoning.encrypted_content"]}, "include[0]"),
    ("tokenize", {"messages": user(foo=1)}, "messages[0].foo"),
    ("tokenize", {"prompt": "a", "foo": 1}, "foo"),
]


@pytest.mark.parametrize(("route", "body", "path"), CASES, ids=[path for _, _, path in CASES])
def test_unread_key_is_named_by_its_path_or_refused(
    model: ServedModel, route: str, body: dict[str, Any], path: str
) -> None:
    assert READERS[route](body, model, SERVING).ignored == (path,)
    with pytest.raises(UserError, match="not served here") as caught:
        READERS[route](body, model, STRICT)
    assert (caught.value.param, caught.value.code) == (  # type: ignore[attr-defined]
        path,
        "unknown_parameter",
    )


def test_keys_that_change_nothing_or_are_read_are_not_named(model: ServedModel) -> None:
    image = {"type": "image_url", "image_url": {"url": URI, "detail": "auto"}, "foo": None}
    schema = {"type": "object", "x-any": 1}
    body = {
        "messages": user(image),
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "chat_template_kwargs": {"thinking": False},  # the template reads it
    }
    assert read_chat(body, model, STRICT).ignored == ()


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat", {"messages": user({"type": "text", "text": "a", "k" * 90_000: 1})}),
        ("tokenize", {"messages": user({"type": "image", "image": {"url": URI, "k" * 90_000: 1}})}),
        ("response", {"input": user({"type": "image", "image": URI, "k" * 90_000: 1})}),
        ("chat", {"messages": user(), "mm_processor_kwargs": {"k" * 90_000: 1}}),
    ],
)
def test_path_of_a_long_key_is_cut(model: ServedModel, route: str, body: dict[str, Any]) -> None:
    [path] = READERS[route](body, model, SERVING).ignored
    assert path.endswith("kkkk")
    assert len(path) <= 160


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": user(foo=1), "max_tokens": 1}),
        ("/tokenize", {"messages": user(foo=1)}),
    ],
)
def test_answer_names_ignored_keys_in_a_header(site: Site, path: str, body: dict[str, Any]) -> None:
    status, _, headers = site.request("POST", path, body)
    assert (status, headers["x-ignored-fields"]) == (200, "messages[0].foo")
    status, text, headers = site.request("POST", "/detokenize", {"tokens": [1], "foo": 1})
    assert (status, headers["x-ignored-fields"]) == (200, "foo"), json.loads(text)
