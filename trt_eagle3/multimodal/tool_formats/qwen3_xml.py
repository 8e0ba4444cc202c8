"""The XML format of tool calls in the chat templates of Qwen3-Coder and Qwen3.5::

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Values are not escaped. The tool's schema gives their types (``schema.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from trt_eagle3.multimodal.tool_formats.format import (
    CallGrammar,
    CallPiece,
    CallProgress,
    CallReader,
)
from trt_eagle3.multimodal.tool_formats.parts import ParametersPart, Part
from trt_eagle3.multimodal.tool_formats.qwen3_xml_grammar import any_parameters
from trt_eagle3.multimodal.tool_formats.schema import Parameters, json_from_text, schema_text
from trt_eagle3.multimodal.tools import Tool

__all__ = ["QWEN3_XML"]

_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_NAME = r"[^<>\n]{1,256}"
_TAG = re.compile(f"<parameter=({_NAME})>")
_MARK = re.compile(f"<(?P<kind>parameter|function)=(?P<name>{_NAME})>|</parameter>|</function>")
_CUT_MARK = re.compile(r"<(?:parameter|function)=[^<>\n]{0,256}")
_BLANKS = re.compile(r"\s*")
_MARKS = (_FUNCTION, _END_FUNCTION, _PARAMETER, _END_PARAMETER)


class _Qwen3Xml:
    name = "qwen3_xml"
    triggers = (_CALL, _FUNCTION)  # models sometimes omit the first
    takes_text_arguments = False
    only_first = False

    def is_taught(self, text: str) -> bool:
        return _FUNCTION in text and _PARAMETER in text

    def reader(self, tools: Mapping[str, Tool]) -> CallReader:
        return _Qwen3XmlReader(tools)

    def grammar(self, tool: Tool, *, strict: bool) -> CallGrammar:
        begin = f"{_CALL}\n{_FUNCTION}{tool.name}>\n"
        content: Part = (
            ParametersPart(tool.name, schema_text(dict(tool.arguments)))
            if strict
            else any_parameters()
        )
        return CallGrammar(begin, (content,), f"{_END_FUNCTION}\n{_END_CALL}")


QWEN3_XML = _Qwen3Xml()


class _Qwen3XmlReader:
    """Convert arguments to JSON text as they arrive: strings at once, other values at their end.

    A value may contain tags. ``</parameter>`` ends a value only before a tag that may follow a
    parameter. Opening tags on a line of their own inside a value are counted, so a value may quote
    a whole call. If ``</parameter>`` is missing, the value ends at the end of the function or at
    another parameter of the tool.
    """

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self._held = ""
        self._state: Callable[[bool], bool] = self._head
        self._pieces: list[CallPiece] = []
        self._rest: str | None = None
        self._text = ""  # content, if this is not a call
        self._parameters: Parameters = Parameters({})
        self._given: set[str] = set()
        # state of the value that is being read
        self._types: frozenset[str] = frozenset()
        self._value = ""  # its text so far, unless it is emitted at once
        self._depth = 0  # number of open tags inside it
        self._line_start = True  # whether the held text begins a line

    def push(self, text: str, *, last: bool) -> CallProgress:
        self._held += text
        self._pieces = []
        while self._rest is None and self._state(last):
            pass
        return CallProgress(tuple(self._pieces), self._text, self._rest)

    # Each state consumes a prefix of the held text. It returns True if the next state may continue.

    def _head(self, last: bool) -> bool:
        """Read the head, before the first parameter or the end of the function."""
        body = self._held.removeprefix(_CALL).lstrip()
        name, closed, rest = body.removeprefix(_FUNCTION).partition(">")
        if not body.startswith(_FUNCTION):
            begun: bool | None = None if _FUNCTION.startswith(body) else False
        elif not closed:
            begun = None if any(tool.startswith(name) for tool in self._tools) else False
        else:
            begun = _ends_value(rest, 0, last=False) if name in self._tools else False
        if begun:
            self._parameters = Parameters(self._tools[name].parameters)
            self._pieces.append(CallPiece(name, "{"))
            self._held, self._state = rest, self._between
            return True
        if begun is False or last:
            self._text = _CALL if self._held.startswith(_CALL) else _FUNCTION
            self._rest = self._held[len(self._text) :]
        return False

    def _between(self, last: bool) -> bool:
        """Read up to a parameter or the end of the function."""
        del last
        text = self._held.lstrip()
        if tag := _TAG.match(text):
            self._held = text[tag.end() :]
            self._begin_value(tag[1])
            return True
        if text.startswith(_END_FUNCTION):
            self._pieces.append(CallPiece(None, "}"))
            self._held, self._state = text[len(_END_FUNCTION) :], self._tail
            return True
        if text.startswith(_END_CALL):
            self._pieces.append(CallPiece(None, "}"))
            self._rest = text[len(_END_CALL) :]
        return False

    def _tail(self, last: bool) -> bool:
        """Read the end of the call after its function."""
        text = self._held.lstrip()
        if text.startswith(_END_CALL):
            self._rest = text[len(_END_CALL) :]
        elif not _END_CALL.startswith(text):
            self._rest = self._held
        elif last:
            self._rest = ""
        return False

    def _begin_value(self, key: str) -> None:
        comma = ", " if self._given else ""
        self._given.add(key)
        self._types = self._parameters.types(key)
        quote = '"' if self._is_text else ""
        name = json.dumps(key, ensure_ascii=False)
        self._pieces.append(CallPiece(None, f"{comma}{name}: {quote}"))
        self._value, self._depth, self._line_start = "", 0, True
        self._state = self._value_start

    def _value_start(self, last: bool) -> bool:
        """Skip the line break after the tag, which is not part of the value."""
        del last
        if not self._held:
            return False
        self._held = self._held.removeprefix("\n")
        self._state = self._value_text
        return True

    def _value_text(self, last: bool) -> bool:
        at = 0
        while mark := _MARK.search(self._held, at):
            ends = self._value_ends(mark, last=last)
            if ends is None:
                self._take(self._before_line_break(mark.start()))
                return False
            if ends:
                self._end_value(mark)
                return True
            at = mark.end()
        tail = self._held.rfind("<", at)
        if tail < 0 or not _may_become_mark(self._held[tail:]):
            tail = len(self._held)
        self._take(self._before_line_break(tail))
        if last and not self._is_text:  # the answer was truncated
            self._pieces.append(CallPiece(None, self._value))
            self._value = ""
        return False

    def _value_ends(self, mark: re.Match[str], *, last: bool) -> bool | None:
        """Return whether the value ends at ``mark``; None: more text is needed."""
        if mark["kind"]:
            return self._opens_outside(mark)
        if self._depth:
            self._depth -= 1
            return False
        if mark[0] == _END_PARAMETER:
            return _ends_value(self._held, mark.end(), last=last)
        rest = _next_text(self._held, mark.end())
        if rest.startswith(_END_CALL):
            return True
        return (last or None) if _END_CALL.startswith(rest) else False

    def _opens_outside(self, mark: re.Match[str]) -> bool:
        """Return whether an opening tag ends a value whose ``</parameter>`` is missing.

        Otherwise the tag is part of the value.
        """
        start = mark.start()
        if not (self._held[start - 1] == "\n" if start else self._line_start):
            return False
        new = mark["name"] in self._parameters.names and mark["name"] not in self._given
        if mark["kind"] == "parameter" and new and not self._depth:
            return True
        self._depth += 1
        return False

    def _end_value(self, mark: re.Match[str]) -> None:
        self._take(self._before_line_break(mark.start()))
        closing = '"' if self._is_text else json_from_text(self._value, self._types)
        self._pieces.append(CallPiece(None, closing))
        rest = self._held.removeprefix("\n")
        self._held = rest.removeprefix(_END_PARAMETER)
        self._state = self._between

    def _before_line_break(self, stop: int) -> int:
        """Return ``stop`` without a line break before a tag, which is not part of the value."""
        return stop - (stop > 0 and self._held[stop - 1] == "\n")

    def _take(self, stop: int) -> None:
        """Move the held text before ``stop`` into the value."""
        text, self._held = self._held[:stop], self._held[stop:]
        if not text:
            return
        self._line_start = text.endswith("\n")
        if self._is_text:
            self._pieces.append(CallPiece(None, json.dumps(text, ensure_ascii=False)[1:-1]))
        else:
            self._value += text

    @property
    def _is_text(self) -> bool:
        """Whether the value can only be a string."""
        return self._types == {"string"}


def _next_text(text: str, at: int) -> str:
    """Return the text after blanks from ``at`` on, cut to the length of a tag."""
    start = _BLANKS.search(text, at).end()  # type: ignore[union-attr]  # matches everywhere
    return text[start : start + 300]


def _ends_value(text: str, at: int, *, last: bool) -> bool | None:
    """Return whether the text at ``at`` may follow a parameter; None: more text is needed.

    ``last``: the text ends the answer, so the beginning of a tag is enough.
    """
    rest = _next_text(text, at)
    if _TAG.match(rest) or rest.startswith((_END_FUNCTION, _END_CALL)):
        return True
    tags = (_PARAMETER, _END_FUNCTION, _END_CALL)
    begun = any(tag.startswith(rest) for tag in tags) or bool(_CUT_MARK.fullmatch(rest))
    return (last or None) if begun else False


def _may_become_mark(text: str) -> bool:
    return any(mark.startswith(text) for mark in _MARKS) or bool(_CUT_MARK.fullmatch(text))
