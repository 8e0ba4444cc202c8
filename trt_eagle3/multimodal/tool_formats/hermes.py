"""Hermes' format of tool calls, used by Qwen2.5, Qwen3 and Qwen3-VL.

``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``
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

__all__ = ["HERMES"]

_CALL, _END_CALL = "<tool_call>", "</tool_call>"


class _Hermes:
    name = "hermes"
    triggers = (_CALL,)
    takes_text_arguments = True
    only_first = False

    def is_taught(self, text: str) -> bool:
        return _CALL in text and '"arguments"' in text

    def reader(self, tools: Mapping[str, Tool]) -> CallReader:
        return _HermesReader(tools)

    def grammar(self, tool: Tool, *, strict: bool) -> CallGrammar:
        schema = schema_text(dict(tool.arguments) if strict else {"type": "object"})
        begin = f'{_CALL}\n{{"name": {json.dumps(tool.name)}, "arguments": '
        return CallGrammar(begin, schema, f"}}\n{_END_CALL}")


HERMES = _Hermes()


class _HermesReader:
    """Read one call. Emit its arguments verbatim as they arrive."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self._held = ""
        self._state: Callable[[bool], CallProgress] = self._head
        self._end = JsonObjectEnd()

    def push(self, text: str, *, last: bool) -> CallProgress:
        self._held += text
        return self._state(last)

    def _head(self, last: bool) -> CallProgress:
        """Read the call before its arguments."""
        inner = self._held[len(_CALL) :]
        head = match_head(inner)
        if head and head[0] in self._tools:
            name, start = head
            self._held, self._state = inner[start:], self._arguments
            found = self._arguments(last)
            return CallProgress((CallPiece(name), *found.pieces), rest=found.rest)
        body, tag, rest = inner.partition(_END_CALL)
        begun = body.lstrip()[:1]
        if begun not in {"", "{"}:
            return CallProgress(text=_CALL, rest=inner)
        if not tag and not last:
            return CallProgress()
        call = read_call(body, self._tools) if tag else None
        if call is None:
            return CallProgress(text=_CALL + body + tag, rest=rest)
        return CallProgress((call,), rest=rest)

    def _arguments(self, last: bool) -> CallProgress:
        stop = self._end.feed(self._held)
        text = self._held if stop is None else self._held[:stop]
        self._held = self._held[len(text) :]
        pieces = (CallPiece(None, text),) if text else ()
        if stop is None:
            return CallProgress(pieces)
        self._state = self._tail
        return CallProgress(pieces, rest=self._tail(last).rest)

    def _tail(self, last: bool) -> CallProgress:
        """Skip to the end of the call, or to the next call if the end is missing."""
        found = re.search(f"{_END_CALL}|(?={_CALL})", self._held)
        if found:
            return CallProgress(rest=self._held[found.end() :])
        return CallProgress(rest="" if last else None)
