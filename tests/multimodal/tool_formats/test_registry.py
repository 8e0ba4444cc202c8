"""Which format of calls, and which marks of reasoning, a chat template teaches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import click
import pytest

from tests.multimodal.tool_formats.templates import LLAMA3, QWEN3_5, QWEN3_CODER, QWEN3_VL
from tests.tiny import TARGET
from trt_eagle3.commands.serve import serve
from trt_eagle3.errors import UserError
from trt_eagle3.families.qwen3_vl import FAMILY
from trt_eagle3.families.registry import read_target
from trt_eagle3.multimodal.assistant_message import AnswerFormat, AssistantMessage
from trt_eagle3.multimodal.chat_template import ChatTemplate
from trt_eagle3.multimodal.reasoning import Reasoning
from trt_eagle3.multimodal.tool_formats import TOOL_FORMATS, named_tool_format
from trt_eagle3.multimodal.tools import read_tools
from trt_eagle3.serving.config import ToolFormatName

WRITE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "mode": {"type": "integer"},
                "force": {"type": "boolean"},
                "owner": {"type": ["string", "null"]},
                "tags": {"type": "array"},
            },
        },
    },
}
TEMPLATES = {"Qwen3-VL": QWEN3_VL, "Qwen3.5": QWEN3_5, "Qwen3-Coder": QWEN3_CODER}
BROKEN = "{% if tools %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (QWEN3_VL, "hermes"),
        (QWEN3_5, "qwen3_xml"),
        (QWEN3_CODER, "qwen3_xml"),
        (LLAMA3, "llama3_json"),
        # one that shows no call of the past
        (LLAMA3.replace("message.tool_calls", "message.none"), "llama3_json"),
        # one that knows both, and writes the one by default
        (
            "{% if xml is defined %}" + QWEN3_CODER + "{% else %}" + QWEN3_VL + "{% endif %}",
            "hermes",
        ),
        # one that refuses the conversation that is tried
        (BROKEN + "{#<function= <parameter=#}", "qwen3_xml"),
        (BROKEN, "hermes"),
        ("{{ messages[0].content }}", "hermes"),
    ],
)
def test_format_is_the_one_that_the_template_teaches(source: str, expected: str) -> None:
    assert ChatTemplate(source, {}).tool_format.name == expected


def test_format_can_be_named_as_elsewhere() -> None:
    assert {name: named_tool_format(name).name for name in TOOL_FORMATS} == {
        "hermes": "hermes",
        "qwen3_xml": "qwen3_xml",
        "qwen3_coder": "qwen3_xml",
        "llama3_json": "llama3_json",
        "llama3": "llama3_json",
    }
    assert get_args(ToolFormatName) == ("auto", *TOOL_FORMATS)
    [option] = [option for option in serve.params if option.name == "tool_format"]
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == ("auto", *TOOL_FORMATS)
    with pytest.raises(UserError, match=r"tool_format: expected auto, hermes, .* got 'llama'"):
        named_tool_format("llama")


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_template_writes_of_a_call_is_read_as_the_call(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], {})
    arguments = {"text": 'a\n"b"\n', "mode": 7, "force": True, "owner": None, "tags": ["x", 1]}
    call = {"type": "function", "function": {"name": "write", "arguments": arguments}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Write."},
        {"role": "assistant", "content": "So.", "tool_calls": [call, call]},
    ]
    prompt = template.render(turns, [WRITE])
    answer = prompt[prompt.index("So.") :].partition("<|im_end|>")[0]
    message = AssistantMessage.parse(
        answer, read_tools([WRITE]), AnswerFormat(tools=template.tool_format)
    )
    assert message.content == "So."
    assert [(name, json.loads(found)) for name, found in message.calls] == [
        ("write", arguments)
    ] * 2


@pytest.mark.parametrize(("source", "expected"), [(QWEN3_VL, '{"a":  1}'), (QWEN3_5, "\n1\n")])
def test_past_arguments_have_the_form_that_the_format_takes(
    source: str, expected: str, tmp_path: Path
) -> None:
    """Both templates have a place for text; that of XML is no call."""
    shutil.copytree(TARGET, tmp_path, dirs_exist_ok=True)
    mixed = source.replace(
        "{%- for key, value in call.arguments | items %}",
        "{%- if call.arguments is string %}{{ call.arguments }}{% endif %}"
        "{%- for key, value in (call.arguments if call.arguments is mapping else {}) | items %}",
    )
    (tmp_path / "chat_template.jinja").write_text(mixed)
    processor = FAMILY.processor(tmp_path, read_target(TARGET))
    function = {"name": "f", "arguments": '{"a":  1}'}
    turns = [
        {"role": "user", "content": "Hm?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
    ]
    ids = processor.messages(turns).token_ids.tolist()
    assert expected in processor.tokenizer.decode(ids, skip_special_tokens=False)


PROMPT = "{{ messages[0].content }}<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "options", "expected"),
    [
        (QWEN3_5, {}, Reasoning("open")),
        (QWEN3_5, {"enable_thinking": False}, Reasoning("none")),
        (QWEN3_CODER, {}, Reasoning("none")),
        (PROMPT + "[THINK]", {}, Reasoning("open", "[THINK]", "[/THINK]")),
        (
            PROMPT + "{# </seed:think> #}",
            {},
            Reasoning("optional", "<seed:think>", "</seed:think>"),
        ),
        (
            PROMPT + "\u25c1think\u25b7\n",
            {},
            Reasoning("open", "\u25c1think\u25b7", "\u25c1/think\u25b7"),
        ),
        # one that mends other marks of its history
        (PROMPT + "{# </thinking> #}<think>\n", {}, Reasoning("open")),
        (PROMPT + "{# </reasoning> </think> #}", {}, Reasoning("optional")),
        (PROMPT + "{# <think] <rethink> #}", {}, Reasoning("none")),
    ],
)
def test_marks_of_reasoning_are_those_of_the_template(
    source: str, options: dict[str, Any], expected: Reasoning
) -> None:
    found = ChatTemplate(source, {}).reasoning(options)
    assert found == expected


def test_reasoning_is_parsed_by_its_marks() -> None:
    form = AnswerFormat(Reasoning("optional", "[THINK]", "[/THINK]"))
    text = "[THINK]\nwhy </think>\n[/THINK]\n\nso"
    assert AssistantMessage.parse(text, (), form) == AssistantMessage("why </think>", "so")
