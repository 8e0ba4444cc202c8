"""What a model wrote, as a message: its reasoning, its text, and its calls of tools.

Qwen's format, which is Hermes': ``<think>...</think>``, text, and any number of
``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from trt_eagle3.multimodal.json_object import JsonObjectEnd

__all__ = ["AssistantMessage", "CallDelta", "MessageDelta", "MessageParser", "ReasoningMode"]

ReasoningMode = Literal["none", "optional", "open"]
"""Whether an answer may begin with ``<think>`` (optional), or begins behind it (open)."""

_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_MAX_HEAD_LEN = 512  # characters before the arguments: a longer head is looked at once, at its end
_CALL_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)', re.DOTALL
)


@dataclass(frozen=True)
class CallDelta:
    """What a piece of text adds to a call.

    Attributes:
        index: of the call in its message.
        name: of the function, where the call begins here; else None.
        arguments: what is added to the JSON text of the arguments.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class MessageDelta:
    """What a piece of text adds to a message."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def __add__(self, other: MessageDelta) -> MessageDelta:
        return MessageDelta(
            self.reasoning + other.reasoning,
            self.content + other.content,
            self.calls + other.calls,
        )


@dataclass
class AssistantMessage:
    """A message, as far as it was parsed.

    Attributes:
        calls: (name, JSON text of the arguments) of each call.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def parse(
        cls, text: str, tools: Collection[str] = (), reasoning: ReasoningMode = "none"
    ) -> AssistantMessage:
        """The message of a whole text; arguments as of ``MessageParser``."""
        parser = MessageParser(tools, reasoning)
        parser.push(text)
        parser.flush()
        return parser.message

    def add(self, delta: MessageDelta) -> None:
        """Append what a piece of text added."""
        self.reasoning += delta.reasoning
        self.content += delta.content
        for call in delta.calls:
            if call.name is not None:
                self.calls.append((call.name, ""))
            name, arguments = self.calls[call.index]
            self.calls[call.index] = name, arguments + call.arguments


class MessageParser:
    """Parses a text that comes in pieces; however it is cut, the deltas add up to the same message.

    A call is one when it names a known tool and its arguments are an object; its arguments are
    passed on verbatim while they come. Any other ``<tool_call>`` stays part of the text.

    Attributes:
        message: the sum of all deltas so far.
    """

    def __init__(self, tools: Collection[str] = (), reasoning: ReasoningMode = "none") -> None:
        """``tools``: names of functions that may be called; without any, no call is looked for."""
        self.message = AssistantMessage()
        self._tools = frozenset(tools)
        self._held = ""
        self._state = {"none": self._content, "optional": self._start, "open": self._reasoning}[
            reasoning
        ]
        self._strip = reasoning != "none"  # blanks at the beginning of a part
        self._end = JsonObjectEnd()
        self._gap = ""  # blanks that stood before a tag

    def push(self, text: str) -> MessageDelta:
        """What ``text`` adds for certain."""
        return self._run(text, last=False)

    def flush(self) -> MessageDelta:
        """What was held back, at the end of the answer."""
        return self._run("", last=True)

    def _run(self, text: str, *, last: bool) -> MessageDelta:
        self._held += text
        found, before = MessageDelta(), None
        while before != (self._state, self._held):
            before = self._state, self._held
            delta = self._state(last)
            self.message.add(delta)
            found += delta
        return MessageDelta(found.reasoning, found.content, _merged(found.calls))

    # Each state takes what it can of what is held, and may name the next one.

    def _start(self, last: bool) -> MessageDelta:
        """Before the first word: reasoning, or at once text."""
        body = self._held.lstrip()
        if body.startswith(_THINK):
            self._held, self._state, self._strip = body[len(_THINK) :], self._reasoning, True
        elif last or not _THINK.startswith(body):
            self._state, self._strip = self._content, False
        return MessageDelta()

    def _reasoning(self, last: bool) -> MessageDelta:
        text, ended = self._until(_END_THINK, last)
        if ended:
            self._state, self._strip = self._content, True
        return MessageDelta(reasoning=text)

    def _content(self, last: bool) -> MessageDelta:
        if not self._tools:
            text, self._held = self._unstripped(self._held), ""
            return MessageDelta(content=text)
        text, ended = self._until(_CALL, last)
        if ended:
            self._state = self._call_head
        return MessageDelta(content=text)

    def _call_head(self, last: bool) -> MessageDelta:
        """Inside ``<tool_call>``, before its arguments."""
        head = _CALL_HEAD.match(self._held[:_MAX_HEAD_LEN])
        name = _name(head[1]) if head else None
        if head and name in self._tools:
            self._held = self._held[head.end() :]
            self._state, self._end = self._arguments, JsonObjectEnd()
            return MessageDelta(calls=(CallDelta(len(self.message.calls), name),))
        body, tag, rest = self._held.partition(_END_CALL)
        if not tag and not last:
            return MessageDelta()
        self._held, self._state = rest, self._content
        return self._whole_call(body, tag)

    def _whole_call(self, body: str, tag: str) -> MessageDelta:
        """A call in another order or without arguments; else it is text."""
        call = _parse_call(body) if tag else None
        if call is not None and call[0] in self._tools:
            self._strip = True
            return MessageDelta(calls=(CallDelta(len(self.message.calls), *call),))
        self._strip = False
        return MessageDelta(content=self._gap + _CALL + body + tag)

    def _arguments(self, last: bool) -> MessageDelta:
        del last
        stop = self._end.feed(self._held)
        text = self._held if stop is None else self._held[:stop]
        self._held = self._held[len(text) :]
        if stop is not None:
            self._state = self._call_tail
        calls = (CallDelta(len(self.message.calls) - 1, None, text),) if text else ()
        return MessageDelta(calls=calls)

    def _call_tail(self, last: bool) -> MessageDelta:
        """Behind the arguments: nothing that says anything, up to the end of the call."""
        _, tag, rest = self._held.partition(_END_CALL)
        if tag:
            self._held, self._state, self._strip = rest, self._content, True
        elif last:
            self._held = ""
        return MessageDelta()

    def _until(self, tag: str, last: bool) -> tuple[str, bool]:
        """The text before ``tag``, as far as it is certain, and whether the tag came.

        Blanks before the tag are no part of the text: they are held until something follows.
        """
        text, found, rest = self._held.partition(tag)
        if found:
            text, self._held = self._unstripped(text), rest
            self._gap = text[len(text.rstrip()) :]
            return text.rstrip(), True
        if last:
            self._held = ""
            dropped = self._strip and not text.strip()
            return ("" if dropped else self._unstripped(text)), False
        sizes = range(min(len(tag) - 1, len(text)), 0, -1)
        cut = len(text) - next((n for n in sizes if tag.startswith(text[-n:])), 0)
        cut = len(text[:cut].rstrip())
        self._held = text[cut:]
        return self._unstripped(text[:cut]), False

    def _unstripped(self, text: str) -> str:
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        return text


def _merged(calls: tuple[CallDelta, ...]) -> tuple[CallDelta, ...]:
    """``calls`` with those of one call that follow each other as one."""
    merged: list[CallDelta] = []
    for call in calls:
        if merged and merged[-1].index == call.index:
            arguments = merged[-1].arguments + call.arguments
            merged[-1] = CallDelta(call.index, merged[-1].name, arguments)
        else:
            merged.append(call)
    return tuple(merged)


def _name(quoted: str) -> str | None:
    try:
        name = json.loads(quoted)
    except ValueError:
        return None
    return name if isinstance(name, str) else None


def _parse_call(body: str) -> tuple[str, str] | None:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        return None
    return call["name"], json.dumps(arguments, ensure_ascii=False)
