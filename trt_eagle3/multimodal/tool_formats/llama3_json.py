"""Llama 3's format of tool calls: the answer is a JSON object, with or without a token before it.

``<|python_tag|>{"name": ..., "parameters": {...}}``. Several calls are separated by semicolons.
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
from trt_eagle3.multimodal.tool_formats.json_call import match_head, read_call
from trt_eagle3.multimodal.tool_formats.json_object import JsonObjectEnd
from trt_eagle3.multimodal.tool_formats.schema import schema_text
from trt_eagle3.multimodal.tools import Tool

__all__ = ["LLAMA3_JSON"]

_BEGIN, _TAG = '{"name":', "<|python_tag|>"
_NAME = re.compile(r'\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"', re.DOTALL)
_SHOWN = re.compile(r'\{"name": "[^"]*", "parameters": ')
_INSTRUCTION = '"parameters": dictionary of argument name'


class _Llama3Json:
    name = "llama3_json"
    triggers = (_BEGIN, '{"type"', _TAG)  # few: constrained text excludes each
    takes_text_arguments = False
    only_first = True

    def is_taught(self, text: str) -> bool:
        return _INSTRUCTION in text or _SHOWN.search(text) is not None

    def reader(self, tools: Mapping[str, Tool]) -> CallReader:
        return _Llama3JsonReader(tools)

    def grammar(self, tool: Tool, *, strict: bool) -> CallGrammar:
        schema = schema_text(dict(tool.arguments) if strict else {"type": "object"})
        return CallGrammar(f'{_BEGIN} {json.dumps(tool.name)}, "parameters": ', schema, "}")


LLAMA3_JSON = _Llama3Json()


class _Llama3JsonReader:
    """Read one call. Emit its arguments verbatim as they arrive."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self._held = ""
        self._state: Callable[[bool], CallProgress] = self._head
        self._arguments_end = JsonObjectEnd()
        self._call_end = JsonObjectEnd()

    def push(self, text: str, *, last: bool) -> CallProgress:
        self._held += text
        return self._state(last)

    def _head(self, last: bool) -> CallProgress:
        """Read the call before its arguments."""
        body = self._held.removeprefix(_TAG).lstrip()
        head = match_head(body)
        if head and head[0] in self._tools:
            name, start = head
            self._call_end.feed(body[:start])
            self._held, self._state = body[start:], self._arguments
            found = self._arguments(last)
            return CallProgress((CallPiece(name), *found.pieces), rest=found.rest)
        if not self._may_be_call(body):
            return self._text()
        stop = JsonObjectEnd().feed(body)
        if stop is None:
            return self._text() if last else CallProgress()
        call = read_call(body[:stop], self._tools)
        if call is None:
            return self._text()
        self._call_end.feed(body[:stop])
        self._held, self._state = body[stop:], self._separator
        return CallProgress((call,), rest=self._separator(last).rest)

    def _may_be_call(self, body: str) -> bool:
        named = _NAME.match(body)
        return body[:1] in {"", "{"} and (named is None or named[1] in self._tools)

    def _text(self) -> CallProgress:
        return CallProgress(text=self._held, rest="")

    def _arguments(self, last: bool) -> CallProgress:
        stop = self._arguments_end.feed(self._held)
        text = self._held if stop is None else self._held[:stop]
        self._held = self._held[len(text) :]
        self._call_end.feed(text)
        pieces = (CallPiece(None, text),) if text else ()
        if stop is None:
            return CallProgress(pieces, rest="" if last else None)
        self._state = self._tail
        return CallProgress(pieces, rest=self._tail(last).rest)

    def _tail(self, last: bool) -> CallProgress:
        """Skip to the end of the call's object."""
        stop = self._call_end.feed(self._held)
        if stop is None:
            self._held = ""
            return CallProgress(rest="" if last else None)
        self._held, self._state = self._held[stop:], self._separator
        return self._separator(last)

    def _separator(self, last: bool) -> CallProgress:
        """Skip a semicolon after the call."""
        rest = self._held.lstrip()
        if not rest and not last:
            return CallProgress()
        return CallProgress(rest=rest.removeprefix(";"))
