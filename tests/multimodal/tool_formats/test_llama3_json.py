"""Calls in Llama 3's JSON, in pieces of any size, and what stays text beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decode.structured import state_of
from tests.decode.test_tool_grammar import allows
from tests.multimodal.tool_formats.pieces import parse_pieces
from tests.multimodal.tool_formats.templates import LLAMA3
from trt_eagle3.decode.request.conversation import Conversation
from trt_eagle3.decode.sampling.sampling_params import GREEDY
from trt_eagle3.multimodal.assistant_message import AnswerFormat, AssistantMessage, MessageParser
from trt_eagle3.multimodal.chat_template import ChatTemplate
from trt_eagle3.multimodal.tool_formats.llama3_json import LLAMA3_JSON
from trt_eagle3.multimodal.tools import Tool

TOOLS = (Tool("weather"), Tool("now"))
FORM = AnswerFormat(tools=LLAMA3_JSON)
ARGUMENTS = {"city": 'a}b"', "days": [1, {"x": None}]}
CALL = '{"name": "weather", "parameters": ' + json.dumps(ARGUMENTS) + "}"

CALLS: dict[str, tuple[str, list[tuple[str, Any]]]] = {
    "as the template writes it": (CALL, [("weather", ARGUMENTS)]),
    "after the token": (f"<|python_tag|>{CALL}", [("weather", ARGUMENTS)]),
    "arguments": (CALL.replace("parameters", "arguments"), [("weather", ARGUMENTS)]),
    "type first": (
        CALL.replace('{"name"', '{"type": "function", "name"'),
        [("weather", ARGUMENTS)],
    ),
    "a key after the arguments": (CALL[:-1] + ', "id": "1"}', [("weather", ARGUMENTS)]),
    "no blanks": ('{"name":"now","parameters":{}}', [("now", {})]),
    "no arguments": ('{"name": "now"}', [("now", {})]),
    "blanks around": (f"\n\n{CALL}\n", [("weather", ARGUMENTS)]),
    "two": (
        f'{CALL}; {{"name": "now", "parameters": {{}}}}',
        [("weather", ARGUMENTS), ("now", {})],
    ),
    "two on lines": (f"{CALL}\n{CALL}", [("weather", ARGUMENTS)] * 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_call_is_read_wherever_the_answer_is_cut(name: str) -> None:
    text, expected = CALLS[name]
    for cuts in ([], range(len(text)), range(0, len(text), 5)):
        message = parse_pieces(text, cuts, TOOLS, FORM)
        assert message.content == ""
        assert [(called, json.loads(found)) for called, found in message.calls] == expected


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada", "born": 1815}',
        '{"name": "weather", "args": {}}',
        '{"name": ["weather"], "parameters": {}}',
        f"You may answer {CALL}",
        f"[{CALL}]",
        f'{{"call": {CALL}}}',
        "<|python_tag|>print(1)",
        '{"name": "weath',
        "int main() {\n}",
    ],
)
def test_other_text_stays_text(text: str) -> None:
    for cuts in ([], range(len(text))):
        assert parse_pieces(text, cuts, TOOLS, FORM) == AssistantMessage("", text)


def test_text_after_a_call_is_content() -> None:
    message = AssistantMessage.parse(f"{CALL} Done; {CALL}", TOOLS, FORM)
    assert len(message.calls) == 1
    assert message.content == f"Done; {CALL}"


def test_arguments_are_streamed_as_they_arrive() -> None:
    parser = MessageParser(TOOLS, FORM)
    parser.push('{"name": "weather", "parameters": {"ci')
    [delta] = parser.push('ty": "B').calls
    assert delta.arguments == 'ty": "B'


def test_call_that_was_cut_keeps_its_name_and_arguments() -> None:
    message = AssistantMessage.parse(CALL[:50], TOOLS, FORM)
    assert message.calls == [("weather", CALL[34:50])]
    assert message.content == ""


@given(st.text(alphabet='{}[]":;, \nnameprt<|>_g', max_size=60), st.lists(st.integers(0, 99)))
def test_message_does_not_depend_on_the_pieces(text: str, cuts: list[int]) -> None:
    for prefix in ("", '{"name": "now", "parameters": {'):
        whole = AssistantMessage.parse(prefix + text, TOOLS, FORM)
        assert parse_pieces(prefix + text, cuts, TOOLS, FORM) == whole


def test_past_call_of_the_template_is_read_as_the_call() -> None:
    template = ChatTemplate(LLAMA3, {})
    call = {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "no"},
    ]
    prompt = template.render(turns, [tool.to_template() for tool in TOOLS])
    answer = prompt.split("assistant<|end_header_id|>\n\n")[1].partition("<|eot_id|>")[0]
    [(name, arguments)] = AssistantMessage.parse(answer, TOOLS, FORM).calls
    assert (name, json.loads(arguments)) == ("weather", ARGUMENTS)
    assert not template.text_arguments


COUNT = Tool(
    "count",
    parameters={
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    },
)
TWICE = '{"name": "count", "parameters": {"n": 1}}\n' * 2


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ('{"name": "count", "parameters": {"n": 12}}', True),
        (TWICE.rstrip(), True),
        ('{"name": "count", "parameters": {"n": "12"}}', False),
        ('{"name": "other", "parameters": {"n": 12}}', False),
        ("Twelve.", False),
    ],
)
def test_required_call_is_constrained_to_its_schema(text: str, allowed: bool) -> None:
    required = Conversation((), (COUNT,), "required").constrained(GREEDY, FORM).grammar
    assert required is not None
    assert allows(state_of(required), text) is allowed


def test_strict_tool_allows_text_and_its_calls() -> None:
    strict = replace(COUNT, strict=True)
    free = Conversation((), (strict,), "auto").constrained(GREEDY, FORM).grammar
    assert free is not None
    for text, allowed in [
        ("Twelve, as in int main() {\n}", True),
        ('{"name": "count", "parameters": {"n": 12}}', True),
        ('{"name": "count", "parameters": {"m": 12}}', False),
    ]:
        assert allows(state_of(free), text) is allowed, text
