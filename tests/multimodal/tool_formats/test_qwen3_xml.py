"""Calls in the XML format of Qwen3-Coder and Qwen3.5, however they are cut into pieces."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.multimodal.tool_formats.pieces import parse_pieces
from trt_eagle3.multimodal.assistant_message import AnswerFormat, AssistantMessage, MessageParser
from trt_eagle3.multimodal.reasoning import Reasoning
from trt_eagle3.multimodal.tool_formats.qwen3_xml import QWEN3_XML
from trt_eagle3.multimodal.tools import Tool

XML = AnswerFormat(tools=QWEN3_XML)
WRITE = Tool(
    "write",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "mode": {"type": "integer"},
            "force": {"type": "boolean"},
            "owner": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "meta": {"$ref": "#/$defs/Meta"},
        },
        "$defs": {"Meta": {"type": "object"}},
    },
)
TOOLS = (WRITE, Tool("now"))


def call(name: str, /, **values: str) -> str:
    """A call as the templates write it."""
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def arguments(text: str) -> Any:
    """Of the one call that ``text`` is."""
    message = AssistantMessage.parse(text, TOOLS, XML)
    assert message.content == ""
    [(name, found)] = message.calls
    assert name == "write"
    return json.loads(found)


def test_values_have_the_types_of_the_schema() -> None:
    text = call(
        "write",
        path="/a b",
        mode="420",
        force="true",
        owner="null",
        tags='["x", "</y>"]',
        meta="{}",
    )
    assert arguments(text) == {
        "path": "/a b",
        "mode": 420,
        "force": True,
        "owner": None,
        "tags": ["x", "</y>"],
        "meta": {},
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", ""),
        ("12", "12"),
        ("null", "null"),
        ('{"a": 1}', '{"a": 1}'),
        ("two\nlines", "two\nlines"),
        ("\n  kept\n\n", "\n  kept\n\n"),
        ('q"\\é\t\u2028', 'q"\\é\t\u2028'),
        ("a < b && </p> <parameter", "a < b && </p> <parameter"),
        ("ends </parameter> not", "ends </parameter> not"),
        ("</parameter>x\n</function>y", "</parameter>x\n</function>y"),
        ("see <parameter=q> there", "see <parameter=q> there"),
        (call("other", a="1", b="2"), call("other", a="1", b="2")),
        (call("write", path="q"), call("write", path="q")),
    ],
)
def test_text_value_is_kept_to_the_character(value: str, expected: str) -> None:
    assert arguments(call("write", path="p", text=value)) == {"path": "p", "text": expected}


def test_one_line_break_is_removed_from_each_end() -> None:
    begin, end = (
        "<tool_call><function=write><parameter=path>",
        "</parameter></function></tool_call>",
    )
    for value, expected in {
        "x": "x",
        "\nx": "x",
        "\nx\n": "x",
        "\n\nx\n\n": "\nx\n",
        "\n": "",
    }.items():
        assert arguments(f"{begin}{value}{end}") == {"path": expected}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Python's words, of templates that write past values so
        (call("write", force="True", owner="None"), {"force": True, "owner": None}),
        (call("write", meta="{'a': True}", tags="['x']"), {"meta": {"a": True}, "tags": ["x"]}),
        # what is no value of its type stays text
        (call("write", mode="many", force="yes"), {"mode": "many", "force": "yes"}),
        (call("write", meta='{"a": NaN}', mode="1e999"), {"meta": '{"a": NaN}', "mode": "1e999"}),
        (call("write", mode="5.0"), {"mode": 5}),
        # parameters that the schema does not name
        (call("write", other="5"), {"other": "5"}),
        # forgotten tags
        (
            call("write", path="p", text="t").replace("</parameter>\n", ""),
            {"path": "p", "text": "t"},
        ),
        (call("write", path="p").replace("</function>\n", ""), {"path": "p"}),
        (call("write", path="p").replace("\n</tool_call>", ""), {"path": "p"}),
        (call("write", path="p").removeprefix("<tool_call>\n"), {"path": "p"}),
    ],
)
def test_what_models_write_beside_the_format_is_read(text: str, expected: Any) -> None:
    assert arguments(text) == expected
    single = parse_pieces(text, range(len(text)), TOOLS, XML)
    assert json.loads(single.calls[0][1]) == expected


CASES: list[tuple[str, AssistantMessage]] = [
    (
        f"I look.\n\n{call('now')}\n{call('write', path='p')}\n",
        AssistantMessage("", "I look.", [("now", "{}"), ("write", '{"path": "p"}')]),
    ),
    (
        "<tool_call>\n<function=now>\n</function>\n<function=now>\n</function>\n</tool_call>",
        AssistantMessage("", "", [("now", "{}"), ("now", "{}")]),
    ),
    # no calls: another tool, a mention, another format, no parameter where one must stand
    *[
        (text, AssistantMessage("", text))
        for text in (
            f"a {call('rm', path='/')} b",
            "Write <tool_call> and then <function=now> to call.",
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
            "<tool_call>\n<function=write>\nplease\n</function>\n</tool_call>",
            "<tool_call>\n<function=now",
            "<tool_call>\n<function=now>\n",
            "x <tool_call",
        )
    ],
    # cut off
    *[
        (
            f"<tool_call>\n<function=write>\n<parameter=path>\nPar{cut}",
            AssistantMessage("", "", [("write", '{"path": "Par')]),
        )
        for cut in ("", "\n", "\n</para")
    ],
    # cut off in a tag behind a value
    *[
        (
            f"<tool_call>\n<function=write>\n<parameter=path>\nParis{cut}",
            AssistantMessage("", "", [("write", f'{{"path": "Paris"{end}')]),
        )
        for cut, end in (
            ("\n</parameter>\n", ""),
            ("\n</parameter>\n<par", ""),
            ("\n</parameter>\n<parameter=mo", ""),
            ("\n</parameter>\n</func", ""),
            ("\n</parameter>\n</function>\n</tool", "}"),
            ("\n</function>\n</tool", "}"),
        )
    ],
    (
        "<tool_call>\n<function=write>\n<parameter=mode>\n12\n</parameter>\n<para",
        AssistantMessage("", "", [("write", '{"mode": 12')]),
    ),
    (
        "<tool_call>\n<function=write>\n<parameter=mode>\n12",
        AssistantMessage("", "", [("write", '{"mode": 12')]),
    ),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_message_of_whole_text_and_of_single_characters(
    text: str, expected: AssistantMessage
) -> None:
    assert AssistantMessage.parse(text, TOOLS, XML) == expected
    assert parse_pieces(text, range(len(text)), TOOLS, XML) == expected


@settings(max_examples=300)
@given(
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "\n<function=write>",
                "\n<function=now>",
                "<function=rm>",
                "\n<parameter=path>",
                "\n<parameter=mode>",
                "<parameter=zz>\n",
                "\n</parameter>",
                "\n</function>",
                "</tool_call>",
                "\n",
                "5",
                "x ",
                "<",
            ]
        ),
        max_size=14,
    ).map("".join),
    st.lists(st.integers(0, 999), max_size=6),
    st.booleans(),
)
def test_pieces_add_up_to_the_message_of_the_whole(
    text: str, cuts: list[int], thinks: bool
) -> None:
    form = AnswerFormat(Reasoning("open" if thinks else "none"), QWEN3_XML)
    text = f"so</think>{text}" if thinks else text
    assert parse_pieces(text, cuts, TOOLS, form) == AssistantMessage.parse(text, TOOLS, form)


@given(st.text("ab<>/=\n \"'{}[]1", max_size=40), st.integers(-(10**20), 10**20))
def test_values_come_back_as_the_template_writes_them(text: str, number: int) -> None:
    found = arguments(call("write", text=f"{text}.", mode=str(number)))
    assert found == {"text": f"{text}.", "mode": number}


def test_strings_are_streamed_as_they_come() -> None:
    parser = MessageParser(TOOLS, XML)
    assert not parser.push("<tool_call>\n<function=write>\n<param")
    [begun] = parser.push("eter=text>\n").calls
    assert (begun.name, begun.arguments) == ("write", '{"text": "')
    [more] = parser.push("one\ntwo\n").calls
    assert (more.index, more.name, more.arguments) == (0, None, "one\\ntwo")
    assert not parser.push("</parameter>\n")
    [last] = parser.push("</function>").calls
    assert last.arguments == '"}'


def test_long_answers_cost_no_more_than_their_length() -> None:
    start = time.perf_counter()
    for begun, text in {
        "<tool_call>": " ",
        "<tool_call>\n<function=write>\n<parameter=text>\n": "\n</parameter>",
        "<tool_call>\n<function=write>\n<parameter=path>\n": "\n<parameter=x>",
        "<tool_call>\n<function=write>\n<parameter=mode>\n": "1",
        "": "<tool_call>",
    }.items():
        parser = MessageParser(TOOLS, XML)
        parser.push(begun)
        for _ in range(3_000):
            parser.push(text)
        parser.flush()
    assert time.perf_counter() - start < 5
