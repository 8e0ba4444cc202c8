"""Calls in Hermes' format that differ from what the template shows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.multimodal.tool_formats.pieces import parse_pieces
from trt_eagle3.multimodal.assistant_message import AnswerFormat, AssistantMessage, MessageParser
from trt_eagle3.multimodal.tools import Tool

TOOLS = (Tool("weather"), Tool("now"))
ARGUMENTS = {"city": "a}b"}


@pytest.mark.parametrize(
    ("body", "name", "expected"),
    [
        ('{"name": "weather", "parameters": {"city": "a}b"}}', "weather", ARGUMENTS),
        ('{"parameters": {"city": "a}b"}, "name": "weather"}', "weather", ARGUMENTS),
        ('{"id": "1", "name": "weather", "parameters": {"city": "a}b"}}', "weather", ARGUMENTS),
        ('{"id": "1", "name": "now", "type": "function"}', "now", {}),
    ],
)
def test_arguments_are_kept_whatever_the_call_calls_them(
    body: str, name: str, expected: Any
) -> None:
    text = f"<tool_call>\n{body}\n</tool_call>"
    for cuts in ([], range(len(text))):
        message = parse_pieces(text, cuts, TOOLS, AnswerFormat())
        assert message.content == ""
        assert [(called, json.loads(found)) for called, found in message.calls] == [
            (name, expected)
        ]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "weather", "args": {"city": "x"}}</tool_call>',
        '<tool_call>{"name": ["weather"]}</tool_call>',
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ],
)
def test_call_that_is_not_understood_stays_text(text: str) -> None:
    assert AssistantMessage.parse(text, TOOLS) == AssistantMessage("", text)


def test_mention_of_the_tag_is_streamed_at_once() -> None:
    parser = MessageParser(TOOLS)
    assert parser.push("Write <tool_call> and").content == "Write <tool_call> and"


def test_call_without_its_end_does_not_swallow_the_next() -> None:
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n'
    assert AssistantMessage.parse(text * 2, TOOLS).calls == [("now", "{}")] * 2
