"""The reader of tool calls, which shares nothing with the parser that it judges."""

from __future__ import annotations

import pytest

from tests.multimodal.tool_formats.templates import LLAMA3
from trt_eagle3.multimodal.chat_template import ChatTemplate
from trt_eagle3.multimodal.tool_formats.hermes import HERMES
from trt_eagle3.multimodal.tool_formats.llama3_json import LLAMA3_JSON
from trt_eagle3.multimodal.tool_formats.qwen3_xml import QWEN3_XML
from trt_eagle3.parity.checks.tools_format import format_fault, template_fault

WAIT = '<tool_call>\n{"name": "wait", "arguments": {"minutes": 7}}\n</tool_call>'
LIGHT = (
    '<tool_call>\n{"name": "light", "arguments": {"room": "the \\"loft\\"", "on": true}}\n'
    "</tool_call>"
)
TEMPLATE = """{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}
{%- for message in messages %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}{% endfor %}"""


@pytest.mark.parametrize("text", [WAIT, LIGHT, f"{LIGHT}\n{WAIT}", f"{WAIT}{LIGHT}\n"])
def test_calls_as_demanded_have_no_fault(text: str) -> None:
    assert format_fault(text, HERMES, cut=False, named=False) == ""


@pytest.mark.parametrize("length", [0, 5, 30, len(WAIT) - 1])
def test_answer_that_was_cut_may_end_anywhere(length: int) -> None:
    assert (
        format_fault(f"{LIGHT}\n{WAIT}"[: len(LIGHT) + length], HERMES, cut=True, named=False) == ""
    )


@pytest.mark.parametrize("argument", ['"hours"', '"hou', '"x": 1, "minutes": 2'])
def test_answer_that_was_cut_begins_as_a_call(argument: str) -> None:
    text = f'<tool_call>\n{{"name": "wait", "arguments": {{{argument}'
    assert "outside calls" in format_fault(text, HERMES, cut=True, named=False)
    assert "outside calls" in format_fault(
        text.replace("wait", "weight"), HERMES, cut=True, named=False
    )


@pytest.mark.parametrize(
    ("text", "named", "fault"),
    [
        ("", False, "no call"),
        (f"Sure. {WAIT}", False, "outside calls"),
        (WAIT[:-3], False, "outside calls"),
        (WAIT.replace("wait", "weight"), False, "no call of a tool"),
        (WAIT.replace("7", '"7"'), False, "no call of a tool"),
        (WAIT.replace("7", "100"), False, "no call of a tool"),
        (WAIT.replace("7", "true"), False, "no call of a tool"),
        (WAIT.replace("7}", '7, "seconds": 1}'), False, "no call of a tool"),
        (LIGHT.replace("true", "1"), False, "no call of a tool"),
        (LIGHT, True, "not one call of wait"),
        (f"{WAIT}\n{WAIT}", True, "not one call of wait"),
    ],
)
def test_every_other_answer_has_one(text: str, named: bool, fault: str) -> None:
    assert fault in format_fault(text, HERMES, cut=False, named=named)


def test_template_must_write_calls_as_answers_must() -> None:
    assert template_fault(ChatTemplate(TEMPLATE, {}), HERMES) == ""
    other = TEMPLATE.replace('"arguments"', '"parameters"')
    assert "no call as expected" in str(template_fault(ChatTemplate(other, {}), HERMES))


@pytest.mark.parametrize("gone", ["{% if tools %}", "message.tool_calls or"])
def test_template_that_knows_no_tools_is_not_judged(gone: str) -> None:
    source = TEMPLATE.replace(gone, {"{% if tools %}": "{% if false %}"}.get(gone, ""))
    assert template_fault(ChatTemplate(source, {}), HERMES) is None


XML_WAIT = (
    "<tool_call>\n<function=wait>\n<parameter=minutes>\n7\n</parameter>\n</function>\n</tool_call>"
)
XML_LIGHT = (
    '<tool_call>\n<function=light>\n<parameter=room>\nthe "loft"\n</parameter>\n'
    "<parameter=on>\ntrue\n</parameter>\n</function>\n</tool_call>"
)


def test_calls_in_xml_have_no_fault() -> None:
    text = f"{XML_LIGHT}\n{XML_WAIT}"
    assert format_fault(text, QWEN3_XML, cut=False, named=False) == ""
    for length in (0, 5, 30, len(XML_WAIT) - 1):
        cut = text[: len(XML_LIGHT) + length]
        assert format_fault(cut, QWEN3_XML, cut=True, named=False) == ""


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (WAIT, "outside calls"),
        (XML_WAIT[:-3], "outside calls"),
        (XML_WAIT.replace("7", "100"), "no call of a tool"),
        (XML_WAIT.replace("minutes", "hours"), "no call of a tool"),
        (XML_LIGHT.replace("true", "yes"), "no call of a tool"),
        (XML_LIGHT.replace("loft", "lift"), "no call of a tool"),
    ],
)
def test_every_other_answer_in_xml_has_one(text: str, fault: str) -> None:
    assert fault in format_fault(text, QWEN3_XML, cut=False, named=False)


def test_template_is_judged_by_the_format_in_use() -> None:
    assert "no call as expected" in str(template_fault(ChatTemplate(TEMPLATE, {}), QWEN3_XML))


LLAMA_WAIT = '{"name": "wait", "parameters": {"minutes": 7}}'


@pytest.mark.parametrize("text", [LLAMA_WAIT, f"{LLAMA_WAIT}\n{LLAMA_WAIT}"])
def test_llama_calls_as_demanded_have_no_fault(text: str) -> None:
    assert format_fault(text, LLAMA3_JSON, cut=False, named=False) == ""
    assert format_fault(text[:-5], LLAMA3_JSON, cut=True, named=False) == ""


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (WAIT, "outside calls"),
        (f"Sure. {LLAMA_WAIT}", "outside calls"),
        (LLAMA_WAIT.replace("7", "100"), "no call of a tool"),
        (LLAMA_WAIT.replace("parameters", "arguments"), "outside calls"),
    ],
)
def test_every_other_answer_of_llama_has_a_fault(text: str, fault: str) -> None:
    assert fault in format_fault(text, LLAMA3_JSON, cut=False, named=False)


def test_llama_template_writes_calls_as_answers_must() -> None:
    assert template_fault(ChatTemplate(LLAMA3, {}), LLAMA3_JSON) == ""
