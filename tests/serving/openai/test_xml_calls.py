"""Calls of a checkpoint whose template teaches Qwen3's XML, over HTTP and in Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from tests.multimodal.tool_formats.templates import QWEN3_5
from tests.serving.openai.model import SERVING, generation, load_with_tools, pieces, sse
from tests.serving.site import Site
from trt_eagle3.decode.llm import LLM, load
from trt_eagle3.decode.request.chat import ChatAnswer
from trt_eagle3.decode.request.conversation import Conversation
from trt_eagle3.multimodal.chat_template import ChatTemplate
from trt_eagle3.serving.openai.chat import read_chat
from trt_eagle3.serving.openai.responses import read_response
from trt_eagle3.serving.served_model import ServedModel

QUESTION = [{"role": "user", "content": "What is 12 plus 30?"}]
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z][a-z]{2,6}$"},
        "hours": {"type": "array", "items": {"enum": [6, 12]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "hours"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
ANSWER = """Hm.
</think>

I look.

<tool_call>
<function=weather>
<parameter=city>
Bonn
</parameter>
<parameter=hours>
[6]
</parameter>
</function>
</tool_call>"""
ARGUMENTS = '{"city": "Bonn", "hours": [6]}'


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("xml")
    with load_with_tools(folder, QWEN3_5, limits={"max_batch_size": 4}) as engine:
        yield engine


def test_answer_is_a_call_whole_and_streamed(model: ServedModel) -> None:
    body = {"messages": QUESTION, "tools": [WEATHER]}
    [choice] = read_chat(body, model, SERVING).reply.whole([generation(ANSWER)])["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "I look.")
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}

    reply = read_chat(body, model, SERVING).reply
    events = sse("".join(reply.piece(0, chunk) for chunk in pieces(ANSWER)))
    deltas = [event["choices"][0]["delta"].get("tool_calls", []) for event in events]
    functions = [call["function"] for calls in deltas for call in calls]
    assert functions[0]["name"] == "weather"
    assert "".join(function["arguments"] for function in functions) == ARGUMENTS
    assert len(functions) > 3
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_response_is_a_call(model: ServedModel) -> None:
    tool = {"type": "function", **WEATHER["function"]}
    body = {"input": "Hm?", "tools": [tool]}
    reply = read_response(body, model, SERVING).reply
    output = reply.whole([generation(ANSWER)])["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert (output[2]["name"], output[2]["arguments"]) == ("weather", ARGUMENTS)
    streamed = read_response(body, model, SERVING).reply
    events = sse(
        "".join(streamed.piece(0, chunk) for chunk in pieces(ANSWER))
        + streamed.closing([generation(ANSWER)])
    )
    kind = "response.function_call_arguments.delta"
    assert "".join(event["delta"] for event in events if event["type"] == kind) == ARGUMENTS


def test_forced_call_is_streamed_and_fits_its_schema(site: Site) -> None:
    events = site.events(
        messages=QUESTION,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1.5,
        seed=3,
        max_tokens=300,
        **PLAIN,
    )
    deltas = [event["choices"][0]["delta"] for event in events]
    assert not any(delta.get("content") for delta in deltas)
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls[0]["name"] == "weather"
    assert len(calls) > 3
    arguments = "".join(call["arguments"] for call in calls)
    jsonschema.validate(json.loads(arguments), PARAMETERS)
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_template_that_ends_reasoning_where_tools_are_offered(model: ServedModel) -> None:
    processor = copy(model.processor)
    source = QWEN3_5.replace(
        "if enable_thinking is defined", "if tools or enable_thinking is defined"
    )
    processor.template = ChatTemplate(source, {})
    quick = replace(model, processor=processor)
    text = ANSWER.partition("</think>")[2].lstrip()
    tool = {"type": "function", **WEATHER["function"]}
    chat = read_chat({"messages": QUESTION, "tools": [WEATHER]}, quick, SERVING)
    [choice] = chat.reply.whole([generation(text)])["choices"]
    assert (choice["message"]["content"], len(choice["message"]["tool_calls"])) == ("I look.", 1)
    response = read_response({"input": "Hm?", "tools": [tool]}, quick, SERVING)
    output = response.reply.whole([generation(text)])["output"]
    assert [item["type"] for item in output] == ["message", "function_call"]
    without = read_chat({"messages": QUESTION}, quick, SERVING)
    [choice] = without.reply.whole([generation(text)])["choices"]
    assert choice["message"]["reasoning_content"].startswith("I look.")


def test_schema_that_xml_cannot_express_is_refused_by_its_field(site: Site) -> None:
    function = {"name": "f", "parameters": {"type": "object", "minProperties": 1}}
    body = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    status, found = site.chat(messages=QUESTION, **body)
    assert (status, found["error"]["param"]) == (400, "tools")
    assert "minProperties" in found["error"]["message"]


def forced(engine: LLM, max_tokens: int) -> ChatAnswer:
    return engine.chat(
        QUESTION,
        tools=[WEATHER],
        tool_choice="weather",
        template_options={"enable_thinking": False},
        max_tokens=max_tokens,
    )


def test_chat_in_python_gives_the_call(engine: LLM) -> None:
    answer = forced(engine, 70)
    assert answer.generation.text.startswith("<tool_call>\n<function=weather>\n<parameter=city>\n")
    [(name, arguments)] = answer.message.calls
    assert name == "weather"
    assert arguments.startswith('{"city": "')


def test_past_call_reaches_the_template_as_a_mapping(engine: LLM) -> None:
    function = {"name": "weather", "arguments": '{"city": "Bonn", "hours": [6, 12]}'}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
    ]
    prompt = engine.prepare(Conversation(messages)).token_ids.tolist()
    text = engine.bundle.processor.tokenizer.decode(prompt, skip_special_tokens=False)
    assert "<parameter=city>\nBonn\n</parameter>\n<parameter=hours>\n[6, 12]\n</parameter>" in text


def test_named_format_replaces_the_one_that_the_template_teaches(engine: LLM) -> None:
    with load(engine.bundle.path, tool_format="hermes") as other:
        answer = forced(other, 70)
    assert answer.generation.text.startswith('<tool_call>\n{"name": "weather", "arguments": {')
    [(name, _)] = answer.message.calls
    assert name == "weather"
