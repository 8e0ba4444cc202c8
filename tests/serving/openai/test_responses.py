"""``/v1/responses``: input items, output items, events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving.openai.model import SERVING, WEATHER, generation, pieces, sse
from tests.serving.site import Site
from tests.tiny import ROOT
from tests.triton.server import data_uri
from trt_eagle3.decode.llm import LLM
from trt_eagle3.errors import UserError
from trt_eagle3.serving.openai.ignored import IgnoredKeys
from trt_eagle3.serving.openai.repairs import Repairs
from trt_eagle3.serving.openai.response_input import read_input
from trt_eagle3.serving.openai.responses import read_response
from trt_eagle3.serving.served_model import ServedModel

QUESTION = "What is 12 plus 30?"
TOOL = {"type": "function", **WEATHER["function"]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
TEXT = f"Why?\n</think>\n\nI look.\n{CALL}\n{CALL}"
THINKING = {"input": QUESTION, "tools": [TOOL], "chat_template_kwargs": {"thinking": True}}


def respond(site: Site, **body: Any) -> tuple[int, Any]:
    status, text, _ = site.request("POST", "/v1/responses", body)
    return status, json.loads(text)


def test_text_equals_generate(site: Site, engine: LLM) -> None:
    expected = engine.generate([{"role": "user", "content": QUESTION}])
    status, found = respond(site, input=QUESTION)
    assert status == 200, found
    [item] = found["output"]
    assert (item["type"], item["status"], item["role"]) == ("message", "completed", "assistant")
    [part] = item["content"]
    assert (part["type"], part["text"]) == ("output_text", expected.text)
    assert (found["object"], found["status"], found["store"]) == ("response", "completed", False)
    assert found["usage"]["input_tokens"] == expected.prompt_tokens
    assert found["usage"]["output_tokens"] == len(expected.token_ids)


def test_image_is_seen(site: Site, engine: LLM) -> None:
    uri = data_uri((ROOT / "examples/tiny/images/scene.png").read_bytes())
    asked = "What do you see?"
    parts = [{"type": "input_image", "image_url": uri}, {"type": "input_text", "text": asked}]
    chat = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": asked}]
    expected = engine.generate([{"role": "user", "content": chat}]).text
    _, found = respond(site, input=[{"role": "user", "content": parts}])
    assert found["output"][0]["content"][0]["text"] == expected


def test_keys_of_parts_are_honoured_and_others_named(site: Site, engine: LLM) -> None:
    uri = data_uri((ROOT / "examples/tiny/images/scene.png").read_bytes())
    sized = {"image_url": uri, "max_pixels": 2000}
    asked = {"role": "user", "content": [{"type": "input_image", **sized, "detail": "low"}]}
    status, text, headers = site.request("POST", "/v1/responses", {"input": [asked]})
    assert (status, headers["x-ignored-fields"]) == (200, "input[0].content[0].detail")
    [message] = json.loads(text)["output"]
    expected = engine.generate([{"role": "user", "content": [{"type": "image_url", **sized}]}])
    assert message["content"][0]["text"] == expected.text


def test_answer_that_is_cut_off_is_incomplete(site: Site) -> None:
    _, found = respond(site, input=QUESTION, max_output_tokens=3)
    assert found["status"] == found["output"][0]["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}


def test_events_of_a_stream_lead_to_the_response(site: Site) -> None:
    _, whole = respond(site, input=QUESTION)
    body = {"input": QUESTION, "stream": True}
    status, text, _ = site.request("POST", "/v1/responses", body)
    assert status == 200
    events = sse(text)
    names = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [name.removeprefix("response.") for name in names]
    deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    assert [kind for kind in kinds if kind != "output_text.delta"] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    said = whole["output"][0]["content"][0]["text"]
    assert "".join(deltas) == said
    last = events[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == said
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_reasoning_text_and_calls_are_items(model: ServedModel, size: int) -> None:
    ids = model.processor.tokenize(TEXT)
    whole = read_response(THINKING, model, SERVING).reply.whole([generation(TEXT, ids)])
    items = whole["output"]
    assert [item["type"] for item in items] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert items[0]["content"][0] == {"type": "reasoning_text", "text": "Why?"}
    assert (items[2]["name"], items[2]["arguments"]) == ("weather", '{"city": "Bonn"}')
    assert all(item["status"] == "completed" for item in items)

    reply = read_response(THINKING, model, SERVING).reply
    events = sse(
        reply.opening()
        + "".join(reply.piece(0, chunk) for chunk in pieces(TEXT, size))
        + reply.closing([generation(TEXT)])
    )
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert [_without_ids(item) for item in done] == [_without_ids(item) for item in items]
    assert events[-1]["response"]["output"] == done
    count = len(model.processor.tokenize("Why?\n"))
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": count}
    arguments = [
        e["delta"]
        for e in events
        if e["type"].endswith("arguments.delta") and e["output_index"] == 2
    ]
    assert "".join(arguments) == '{"city": "Bonn"}'


def _without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in {"id", "call_id"}}


def test_failure_in_a_stream_is_an_event(model: ServedModel) -> None:
    reply = read_response({"input": "x"}, model, SERVING).reply
    error = {"error": {"code": None, "message": "it broke"}}
    [event] = sse(reply.failed(error))
    assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
    assert event["response"]["error"] == {"code": "server_error", "message": "it broke"}


def test_items_become_the_messages_of_a_chat() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "12"},
    ]
    system, developer, user, assistant, tool = read_input(
        items, "You help.", IgnoredKeys(strict=True), Repairs(text_arguments=True)
    )
    assert system == {"role": "system", "content": "You help."}
    assert developer == {"role": "developer", "content": "Be brief."}
    assert user["content"] == [{"type": "text", "text": "hi"}]
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "hm")
    assert [call["function"]["name"] for call in assistant["tool_calls"]] == ["f", "g"]
    assert tool == {"role": "tool", "content": "12", "tool_call_id": "1"}


def test_format_and_choice_of_tools_are_grammars(model: ServedModel) -> None:
    text = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    [request] = read_response({"input": "x", "text": text}, model, SERVING).requests
    assert request.sampling.grammar.field == "text.format"  # type: ignore[union-attr]
    body = {"input": "x", "tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}}
    [request] = read_response(body, model, SERVING).requests
    assert json.loads(request.sampling.grammar.source)["required"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "critic", "content": "x"}]}, "input"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"input": "x", "text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "a " * 2000}, "input"),
    ],
)
def test_bad_body_is_a_400_that_names_the_field(
    site: Site, body: dict[str, Any], param: str
) -> None:
    status, found = respond(site, **body)
    assert (status, found["error"]["param"]) == (400, param), found


def test_logprobs_want_their_include(model: ServedModel) -> None:
    include = ["message.output_text.logprobs"]
    body = {"input": "x", "include": include, "top_logprobs": 3}
    [request] = read_response(body, model, SERVING).requests
    assert request.sampling.logprobs == 3
    with pytest.raises(UserError, match="include"):
        read_response({"input": "x", "top_logprobs": 3}, model, SERVING)
