"""Check of tool calls.

An independent parser must read the text of an answer as the requested calls. The message parser,
fed in pieces, must return the same calls. The checkpoint's chat template must write calls in the
same format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.assistant_message import AnswerFormat, AssistantMessage, MessageParser
from trt_eagle3.multimodal.chat_template import ChatTemplate
from trt_eagle3.multimodal.tool_formats import ToolFormat
from trt_eagle3.multimodal.tools import Tool
from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.record.tool_calls import NAMED_TOOL, TOOLS

__all__ = ["check_tools_format", "format_fault", "template_fault"]

_PARAMETER = re.compile(r"<parameter=(\w+)>\n(.*?)\n</parameter>\n", re.DOTALL)
_PIECE = 3  # characters per call of the parser
Call = tuple[str, Any]


def check_tools_format(e: Evidence, m: Measurements) -> None:
    """Check every answer that must call tools, and the template if it supports tools."""
    assert e.record.options is not None, "options were not recorded"
    processor = e.engine.processor
    for answer in e.record.options.answers:
        if answer.sampling.grammar is None or answer.sampling.grammar.kind != "tags":
            continue
        for found in (answer.autoregressive, *answer.speculative):
            cut, named = found.finish_reason == "length", answer.options == "named tool"
            fault = format_fault(found.text, processor.tool_format, cut=cut, named=named)
            m.count(calls=len(_reader(processor.tool_format).call.findall(found.text)))
            compared = len(found.token_ids)
            m.add(int(bool(fault)), answer.case, answer.options, None, fault, compared=compared)
    of_template = template_fault(processor.template, processor.tool_format)
    if of_template is not None:
        wrong = int(bool(of_template))
        m.add(wrong, "chat template", "tools", None, of_template, compared=1)


def format_fault(text: str, tool_format: ToolFormat, *, cut: bool, named: bool) -> str:
    """Return what is wrong with an answer; empty if it is correct.

    Args:
        cut: the answer was not finished.
        named: it must be one call of ``NAMED_TOOL``.
    """
    reader = _reader(tool_format)
    around = reader.call.sub("", text).strip()
    if around and not (cut and reader.may_become_call(around)):
        return f"text outside calls: {around!r:.60}"
    calls = []
    for body in reader.call.findall(text):
        call = reader.read(body)
        if call is None:
            return f"no call of a tool with its arguments: {body!r:.60}"
        calls.append(call)
    if not cut and not calls:
        return "no call"
    if named and (len(calls) > 1 or any(name != NAMED_TOOL for name, _ in calls)):
        return f"not one call of {NAMED_TOOL}: {text!r:.60}"
    message = _parsed(text, tool_format)
    parsed = [(name, _json(arguments)) for name, arguments in message.calls[: len(calls)]]
    if parsed != calls or (message.content and not cut):
        return f"parsed as {message.calls} {message.content!r:.40}"
    return ""


def template_fault(template: ChatTemplate, tool_format: ToolFormat) -> str | None:
    """Return what is wrong with the template's text of a tool call.

    Empty if it has the format of answers; None if the template does not support tools.
    """
    arguments = {"minutes": 7}
    call = {"type": "function", "function": {"name": NAMED_TOOL, "arguments": arguments}}
    turns: list[Mapping[str, Any]] = [
        {"role": "user", "content": "Wait."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": "And?"},
    ]
    try:
        text = template.render(turns, [tool.to_template() for tool in TOOLS])
    except UserError as error:
        return None if "not made for tools" in str(error) else str(error)
    # the tool descriptions in the prompt may also show a call
    reader = _reader(tool_format)
    calls = [reader.read(body) for body in reader.call.findall(text)]
    return "" if (NAMED_TOOL, arguments) in calls else f"no call as expected: {text!r:.80}"


class _Json:
    """Parses calls that are JSON objects.

    Args:
        call: regular expression of a call; its group is the object.
        start: text before the object. key: of the arguments.
    """

    def __init__(self, call: str, start: str, key: str) -> None:
        self.call = re.compile(call, re.DOTALL)
        self._start, self._key = start, key
        self._begun = re.compile(
            rf'{re.escape(start)}\{{"name": "(?P<name>\w+)", "{key}": '
            r'\{\s*"(?P<key>[^"]*)(?P<end>"?)'
        )

    def read(self, body: str) -> Call | None:
        """Return name and arguments, if the call matches the schema of a known tool."""
        call = _json(body)
        if not isinstance(call, dict) or call.keys() != {"name", self._key}:
            return None
        return _valid(call["name"], call[self._key])

    def may_become_call(self, text: str) -> bool:
        """Return whether ``text`` may begin a call, checked up to its first argument."""
        begun = self._begun.match(text)
        if begun is None:
            heads = [f'{self._start}{{"name": "{tool.name}", "{self._key}": {{' for tool in TOOLS]
            return any(head.startswith(text[: len(head)]) for head in heads)
        tool = _tool(begun["name"])
        names = tool.parameters["properties"] if tool else ()
        if begun["end"]:
            return begun["key"] in names
        return any(name.startswith(begun["key"]) for name in names)


class _Qwen3Xml:
    """Parses Qwen3's XML."""

    call = re.compile(r"<tool_call>\n(<function=.*?</function>)\n</tool_call>", re.DOTALL)

    def read(self, body: str) -> Call | None:
        """Return name and arguments as ``_Json.read`` does."""
        name, _, rest = body.removeprefix("<function=").partition(">\n")
        tool = _tool(name)
        if tool is None or _PARAMETER.sub("", rest) != "</function>":
            return None
        properties = tool.parameters["properties"]
        arguments = {
            key: text if "enum" in properties.get(key, {}) else _json(text)
            for key, text in _PARAMETER.findall(rest)
        }
        return _valid(name, arguments)

    def may_become_call(self, text: str) -> bool:
        """Return whether ``text`` may begin a call, as ``_Json.may_become_call`` does."""
        heads = [
            f"<tool_call>\n<function={tool.name}>\n<parameter={key}>\n"
            for tool in TOOLS
            for key in list(tool.parameters["properties"])[:1]
        ]
        return any(head.startswith(text[: len(head)]) for head in heads)


_READERS: Mapping[str, _Json | _Qwen3Xml] = {
    "hermes": _Json(r"<tool_call>\n(\{.*?\})\n</tool_call>", "<tool_call>\n", "arguments"),
    "llama3_json": _Json(r'(\{"name": "\w+", "parameters": \{.*?\}\})', "", "parameters"),
    "qwen3_xml": _Qwen3Xml(),
}


def _reader(tool_format: ToolFormat) -> _Json | _Qwen3Xml:
    return _READERS[tool_format.name]


def _tool(name: Any) -> Tool | None:
    return next((tool for tool in TOOLS if tool.name == name), None)


def _valid(name: Any, arguments: Any) -> Call | None:
    """Return the call, if the tool's schema allows it."""
    tool = _tool(name)
    if tool is None or not isinstance(arguments, dict):
        return None
    properties = tool.parameters["properties"]
    if arguments.keys() != properties.keys():
        return None
    good = all(_allows(properties[key], value) for key, value in arguments.items())
    return (tool.name, arguments) if good else None


def _allows(schema: Mapping[str, Any], value: Any) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "boolean":
        return isinstance(value, bool)
    number = isinstance(value, int) and not isinstance(value, bool)
    return number and schema["minimum"] <= value <= schema["maximum"]


def _parsed(text: str, tool_format: ToolFormat) -> AssistantMessage:
    """Parse ``text`` as a streaming server does."""
    parser = MessageParser(TOOLS, AnswerFormat(tools=tool_format))
    for start in range(0, len(text), _PIECE):
        parser.push(text[start : start + _PIECE])
    parser.flush()
    return parser.message


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
