"""Messages parsed from what a model wrote, however the text is cut into pieces."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.multimodal.tool_formats.pieces import parse_pieces
from trt_eagle3.multimodal.assistant_message import (
    AnswerFormat,
    AssistantMessage,
    MessageDelta,
    MessageParser,
)
from trt_eagle3.multimodal.reasoning import Reasoning, ReasoningMode
from trt_eagle3.multimodal.tools import Tool

TOOLS = (Tool("now"), Tool("weather"))
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "a}\\"b"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now"}\n</tool_call>'
CASES: list[tuple[ReasoningMode, str, AssistantMessage]] = [
    ("none", "Hello \n", AssistantMessage("", "Hello \n")),
    ("none", "<think>x</think> y", AssistantMessage("", "<think>x</think> y")),
    ("optional", "\n<think>\nwhy\n</think>\n\nso", AssistantMessage("why", "so")),
    ("optional", "so <think>", AssistantMessage("", "so <think>")),
    ("open", "why \n not</think>\n\n so \n", AssistantMessage("why \n not", "so \n")),
    ("open", "never ends </thi", AssistantMessage("never ends </thi", "")),
    ("none", CALL, AssistantMessage("", "", [("weather", '{"city": "a}\\"b"}')])),
    (
        "open",
        f"why</think>\n\nI look.\n{CALL}\n{NOW}\n",
        AssistantMessage("why", "I look.", [("weather", '{"city": "a}\\"b"}'), ("now", "{}")]),
    ),
    (
        "none",
        '<tool_call>{"arguments": {"city": "é"}, "name": "weather"}</tool_call>',
        AssistantMessage("", "", [("weather", '{"city": "é"}')]),
    ),
    # not calls: an unknown tool, no JSON, arguments that are no object, no end
    *[
        ("none", f"a\n<tool_call>{body}</tool_call> b", text)
        for body, text in [
            (body, AssistantMessage("", f"a\n<tool_call>{body}</tool_call> b"))
            for body in (
                '{"name": "rm", "arguments": {}}',
                "weather()",
                '{"name": "weather", "arguments": [1]}',
                '{"name": 5, "arguments": {}}',
            )
        ]
    ],
    ("none", "a <tool_call>{", AssistantMessage("", "a <tool_call>{")),
    # cut off inside the arguments
    (
        "none",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Par',
        AssistantMessage("", "", [("weather", '{"city": "Par')]),
    ),
]


@pytest.mark.parametrize(("reasoning", "text", "expected"), CASES)
def test_message_of_whole_text(
    reasoning: ReasoningMode, text: str, expected: AssistantMessage
) -> None:
    assert AssistantMessage.parse(text, TOOLS, AnswerFormat(Reasoning(reasoning))) == expected


@pytest.mark.parametrize(("reasoning", "text", "expected"), CASES)
def test_message_of_single_characters(
    reasoning: ReasoningMode, text: str, expected: AssistantMessage
) -> None:
    answers = AnswerFormat(Reasoning(reasoning))
    assert parse_pieces(text, list(range(len(text))), TOOLS, answers) == expected


@settings(max_examples=300)
@given(
    st.lists(
        st.sampled_from(
            [
                CALL,
                NOW,
                "<think>",
                "</think>",
                "<tool_call>",
                "</tool_call>",
                " ",
                "\n",
                "x",
                "{",
                "<",
            ]
        ),
        max_size=8,
    ).map("".join),
    st.lists(st.integers(0, 999), max_size=6),
    st.sampled_from(["none", "optional", "open"]),
)
def test_pieces_add_up_to_the_message_of_the_whole(
    text: str, cuts: list[int], reasoning: ReasoningMode
) -> None:
    assert parse_pieces(
        text, cuts, TOOLS, AnswerFormat(Reasoning(reasoning))
    ) == AssistantMessage.parse(text, TOOLS, AnswerFormat(Reasoning(reasoning)))


def test_arguments_are_streamed_verbatim_as_they_come() -> None:
    parser = MessageParser(TOOLS)
    assert not parser.push('<tool_call>\n{"name": "weather", ')
    [begun] = parser.push('"arguments": {"city": ').calls
    assert (begun.name, begun.arguments) == ("weather", '{"city": ')
    [more] = parser.push('"Paris"').calls
    assert (more.index, more.name, more.arguments) == (0, None, '"Paris"')
    [last] = parser.push("}}\n</tool_call>").calls
    assert last.arguments == "}"
    [(_, arguments)] = parser.message.calls
    assert json.loads(arguments) == {"city": "Paris"}


def test_calls_are_text_where_no_tools_are_offered() -> None:
    parser = MessageParser()
    assert parser.push(CALL) == MessageDelta(content=CALL)


def test_endless_blanks_and_names_cost_no_more_than_their_length() -> None:
    start = time.process_time()
    for text in (" ", "a", '\\"'):
        parser = MessageParser(TOOLS)
        parser.push('<tool_call>{"name": "' if text != " " else "x")
        for _ in range(5_000):
            parser.push(text)
    assert time.process_time() - start < 5
