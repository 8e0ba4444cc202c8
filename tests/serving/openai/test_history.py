"""Whatever a server answers is accepted back as part of the conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.openai.model import (
    SERVING,
    TEMPLATE,
    WEATHER,
    generation,
    load_with_tools,
    pieces,
    served,
    sse,
)
from tests.serving.site import Site, serving
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.request.conversation import Conversation
from trt_eagle3.errors import UserError
from trt_eagle3.serving import ServingConfig
from trt_eagle3.serving.openai.call import Call
from trt_eagle3.serving.openai.chat import read_chat
from trt_eagle3.serving.openai.responses import read_response
from trt_eagle3.serving.served_model import ServedModel

STRICT = ServingConfig(strict_fields=True)
ASKED = {"role": "user", "content": "hi"}
NEXT = {"role": "user", "content": "And now?"}
FUNCTION = {"type": "function", **WEATHER["function"]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
_PAIRS = (  # as Qwen3-Coder's template, which goes through the arguments of an object
    "<tool_call>{{ call.function.name }}{% for name, value in call.function.arguments | items %}"
    "[{{ name }}={{ value }}]{% endfor %}</tool_call>"
)


def object_template() -> str:
    """The template, but it takes arguments as objects, and one system message."""
    before, _, after = TEMPLATE.partition("\n<tool_call>")
    assert "if call.function.arguments is string" in after
    end, begin = "{% endfor %}<|im_end|>", "{%- for message in messages %}"
    once = (
        "{% if message.role == 'system' and not loop.first %}{{ raise_exception('2') }}{% endif %}"
    )
    return (before + _PAIRS + end + after.partition(end)[2]).replace(begin, begin + once)


@pytest.fixture(scope="module")
def object_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with load_with_tools(tmp_path_factory.mktemp("objects"), object_template()) as engine:
        yield engine


@pytest.fixture(scope="module")
def objects(object_engine: LLM) -> ServedModel:
    return served(object_engine)


def prompt(call: Call, model: ServedModel) -> str:
    """The text of a call's prompt."""
    asked = call.requests[0].prompt
    assert isinstance(asked, Conversation)
    inputs = model.processor.messages(
        asked.messages, tools=asked.offered, options=asked.template_options
    )
    tokenizer = model.processor.tokenizer
    return str(tokenizer.decode(inputs.token_ids.tolist(), skip_special_tokens=False))


ANSWERS = {  # text of an answer, why it ended, and what of it the next prompt must hold
    "text": ("Hello.", "stop", "Hello."),
    "nothing": ("", "stop", "assistant"),
    "reasoning": ("Why?\n</think>\n\nHello.", "stop", "<think>Why?</think>"),
    "reasoning alone": ("Why", "length", "<think>Why</think>"),
    "call": (f"</think>{CALL}", "stop", "Bonn"),
    "text, two calls": (f"R</think>I look.\n{CALL}\n{CALL}", "stop", "I look."),
    "text between calls": (f"</think>{CALL}\nand\n{CALL}", "stop", "and"),
    "unclosed call": ("</think>" + CALL[:-30], "length", "weather"),
    "arguments that are no JSON": ("</think>" + CALL.replace('"city"', "city"), "stop", "weather"),
    "call of an unknown tool": ("</think>" + CALL.replace("weather", "news"), "stop", "news"),
    **{
        f"call cut at {end}": ("</think>" + CALL[:end], "length", "<|im_end|>")
        for end in range(1, len(CALL) - 12, 3)
    },
}


@pytest.mark.parametrize("template", ["text", "objects"])
def test_every_answer_of_chat_is_accepted_back(
    model: ServedModel, objects: ServedModel, template: str
) -> None:
    under = objects if template == "objects" else model
    body = {"tools": [WEATHER], "chat_template_kwargs": {"thinking": True}}
    for name, (text, reason, expected) in ANSWERS.items():
        asked = {"messages": [ASKED], **body}
        whole = read_chat(asked, under, STRICT).reply.whole([generation(text, (1,), reason)])
        reply = read_chat(asked, under, STRICT).reply
        events = sse("".join(reply.piece(0, c) for c in pieces(text, 3, reason)))
        [choice] = whole["choices"]
        messages = [choice["message"], _sum([e["choices"][0]["delta"] for e in events])]
        for message in messages:
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "12"}
                for call in message.get("tool_calls", [])
            ]
            back = {"messages": [ASKED, message, *results, NEXT], **body}
            call = read_chat(back, under, STRICT)
            rendered = prompt(call, under)
            assert expected in rendered, name
            assert "And now?" in rendered
            cut = template == "objects" and (
                "no JSON" in name or ("cut" in name and not _whole(message))
            )
            paths = ("messages[1].tool_calls[0].function.arguments",) if cut else ()
            assert call.repaired == paths, (name, message)


def _whole(message: dict[str, Any]) -> bool:
    try:
        return all(json.loads(c["function"]["arguments"]) for c in message.get("tool_calls", []))
    except ValueError:
        return False


def _sum(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that OpenAI's client makes of deltas."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if name in delta:
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", []):
            if "id" in call:
                calls[call["index"]] = {**call, "function": {**call["function"]}}
            else:
                found = calls[call["index"]]["function"]
                found["arguments"] += call["function"]["arguments"]
    return {**message, **({"tool_calls": list(calls.values())} if calls else {})}


@pytest.mark.parametrize("template", ["text", "objects"])
def test_every_answer_of_responses_is_accepted_back(
    model: ServedModel, objects: ServedModel, template: str
) -> None:
    under = objects if template == "objects" else model
    body = {
        "tools": [FUNCTION],
        "chat_template_kwargs": {"thinking": True},
        "include": ["message.output_text.logprobs"],
    }
    for name, (text, reason, expected) in ANSWERS.items():
        reply = read_response({"input": [ASKED], **body}, under, STRICT).reply
        output = reply.whole([generation(text, (1,), reason)])["output"]
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "12"}
            for item in output
            if item["type"] == "function_call"
        ]
        back = {"input": [ASKED, *output, *results, NEXT], **body}
        call = read_response(back, under, STRICT)
        rendered = prompt(call, under)
        assert expected in rendered or not output, name
        assert "And now?" in rendered
        if template == "objects" and "no JSON" in name:
            assert call.repaired == ("input[1].arguments",)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": None}, "assistant\n<|im_end|>"),
        ({}, "assistant\n<|im_end|>"),
        ({"content": []}, "assistant\n<|im_end|>"),
        ({"content": "", "tool_calls": []}, "assistant\n<|im_end|>"),
        ({"content": "A.", "tool_calls": None, "function_call": None, "audio": None}, "A."),
        ({"content": "A.", "annotations": [{"type": "url_citation"}], "refusal": None}, "A."),
        ({"content": None, "refusal": "I will not."}, "I will not."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": "A.", "reasoning": "Hm."}, "<think>Hm.</think>"),
        ({"content": "A.", "reasoning_content": "Hm.", "reasoning": "Hm."}, "<think>Hm.</think>"),
        ({"content": "A.", "name": "Bo"}, "A."),
        (
            {"tool_calls": [{"id": "toolu_01/é", "index": 0, "function": {"name": "f"}}]},
            '{"name": "f", "arguments": {}}',
        ),
        ({"function_call": {"name": "f", "arguments": '{"a": 1}'}}, '"arguments": {"a": 1}'),
    ],
)
def test_messages_of_other_servers_are_accepted(
    model: ServedModel, message: dict[str, Any], expected: str
) -> None:
    history = [ASKED, {"role": "assistant", **message}, NEXT]
    assert expected in prompt(read_chat({"messages": history}, model, STRICT), model)


def test_result_of_a_function_of_old_is_that_of_a_tool(model: ServedModel) -> None:
    history = [ASKED, {"role": "function", "name": "f", "content": "12"}]
    assert "<|im_start|>tool\n12" in prompt(read_chat({"messages": history}, model, STRICT), model)


def test_reasoning_belongs_to_its_own_turn(model: ServedModel) -> None:
    hm = {"type": "reasoning", "id": "rs", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    made = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    cut = read_response({"input": [ASKED, hm, NEXT, {**NEXT, "role": "assistant"}]}, model, STRICT)
    [_, first, _, last] = cut.requests[0].prompt.messages  # type: ignore[union-attr]
    assert (first["role"], first["reasoning_content"]) == ("assistant", "Hm.")
    assert not last["reasoning_content"]
    said = {"role": "assistant", "content": None}
    between = read_response({"input": [ASKED, said, hm, made]}, model, STRICT)
    [_, one] = between.requests[0].prompt.messages  # type: ignore[union-attr]
    assert (one["reasoning_content"], len(one["tool_calls"])) == ("Hm.", 1)


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({"content": "", "reasoning_content": 5}, "messages[1].reasoning_content"),
        ({"content": "", "refusal": []}, "messages[1].refusal"),
        ({"content": 5}, "messages: content"),
        ({"content": False}, "messages: content"),
        ({"content": {}}, "messages: content"),
    ],
)
def test_message_that_no_server_writes_is_refused(
    model: ServedModel, message: dict[str, Any], path: str
) -> None:
    call = read_chat({"messages": [ASKED, {"role": "assistant", **message}]}, model, SERVING)
    with pytest.raises(UserError) as caught:
        prompt(call, model)
    assert str(caught.value).startswith(path)


def test_instructions_and_developer_item_are_one_system_message(
    model: ServedModel, objects: ServedModel
) -> None:
    parts = [{"type": "input_text", "text": "Be kind."}]
    body = {
        "instructions": "Be brief.",
        "input": [{"type": "message", "role": "developer", "content": parts}, NEXT],
    }
    chat = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": "Be kind."},
            NEXT,
        ]
    }
    for call in (read_response(body, objects, STRICT), read_chat(chat, objects, STRICT)):
        assert "system\nBe brief.\n\nBe kind.<|im_end|>" in prompt(call, objects)
    call = read_response(body, model, STRICT)
    assert prompt(call, model).count("<|im_start|>system") == 2, "this template takes two"


def test_cut_call_is_accepted_over_http_and_its_repair_named(
    site: Site, object_engine: LLM
) -> None:
    cut = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": "{"}}
    messages = [ASKED, {"role": "assistant", "content": None, "tool_calls": [cut]}, NEXT]
    body = {"messages": messages, "tools": [WEATHER], "max_tokens": 1}
    status, text, headers = site.request("POST", "/v1/chat/completions", body)
    assert status == 200, text
    assert "x-repaired-fields" not in headers, "the template took the text as it was"
    with serving(object_engine, SERVING) as other:
        for path in ("/v1/chat/completions", "/tokenize"):
            status, text, headers = other.request("POST", path, body)
            assert status == 200, text
            path = "messages[1].tool_calls[0].function.arguments"
            assert headers["x-repaired-fields"] == path
