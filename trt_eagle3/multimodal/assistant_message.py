"""Parse a model's output into a message: reasoning, text and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from trt_eagle3.multimodal.reasoning import NO_REASONING, Reasoning
from trt_eagle3.multimodal.tool_formats import ToolFormat
from trt_eagle3.multimodal.tool_formats.format import CallReader
from trt_eagle3.multimodal.tool_formats.hermes import HERMES
from trt_eagle3.multimodal.tools import Tool

__all__ = [
    "PLAIN",
    "AnswerFormat",
    "AssistantMessage",
    "CallDelta",
    "MessageDelta",
    "MessageParser",
]


_PIECE_LEN = 4096


@dataclass(frozen=True)
class AnswerFormat:
    """How a checkpoint writes reasoning and tool calls."""

    reasoning: Reasoning = NO_REASONING
    tools: ToolFormat = HERMES


PLAIN = AnswerFormat()
"""Hermes tool calls, without reasoning."""


@dataclass(frozen=True)
class CallDelta:
    """The tool-call fragment that a piece of text adds.

    Attributes:
        index: index of the call in its message.
        name: function name, in the first piece of a call; else None.
        arguments: next fragment of the arguments' JSON text.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class MessageDelta:
    """The reasoning, content and call fragments that a piece of text adds to a message."""

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
    """A message, as far as it is parsed.

    Attributes:
        calls: (name, JSON text of the arguments) of each call.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def parse(
        cls, text: str, tools: Iterable[Tool] = (), answer_format: AnswerFormat = PLAIN
    ) -> AssistantMessage:
        """Parse a whole text; see ``MessageParser`` for the arguments."""
        parser = MessageParser(tools, answer_format)
        parser.push(text)
        parser.flush()
        return parser.message

    def add(self, delta: MessageDelta) -> None:
        """Append ``delta`` to the message."""
        self.reasoning += delta.reasoning
        self.content += delta.content
        for call in delta.calls:
            if call.name is not None:
                self.calls.append((call.name, ""))
            name, arguments = self.calls[call.index]
            self.calls[call.index] = name, arguments + call.arguments


class MessageParser:
    """Parse a text incrementally. The message does not depend on where the text is split.

    A tool call must be in the checkpoint's format and name a known tool. All other text stays
    content, including calls in another format, which may be quotations. If a checkpoint's template
    teaches another format, set it with ``--tool-format``.

    Attributes:
        message: the sum of all deltas so far.
    """

    def __init__(self, tools: Iterable[Tool] = (), answer_format: AnswerFormat = PLAIN) -> None:
        """``tools``: functions that may be called. Without tools, no call is parsed."""
        self.message = AssistantMessage()
        self._tools = {tool.name: tool for tool in tools}
        self._reasoning_marks = answer_format.reasoning
        self._format = answer_format.tools
        self._held = ""
        states = {"none": self._content, "optional": self._start, "open": self._reasoning}
        self._state = states[answer_format.reasoning.mode]
        self._strip = answer_format.reasoning.mode != "none"  # blanks at the start of a part
        self._reader: CallReader | None = None
        self._gap = ""  # blanks before a tag

    def push(self, text: str) -> MessageDelta:
        """Append ``text`` and return the delta that later text cannot change."""
        found = MessageDelta()
        for start in range(0, len(text), _PIECE_LEN):  # the held text is copied at each tag
            found += self._run(text[start : start + _PIECE_LEN], last=False)
        return MessageDelta(found.reasoning, found.content, _merged(found.calls))

    def flush(self) -> MessageDelta:
        """Return the text still held back at the end of the answer."""
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

    # Each state consumes a prefix of the held text and may set the next state.

    def _start(self, last: bool) -> MessageDelta:
        """Choose reasoning or content before the first word."""
        body, start = self._held.lstrip(), self._reasoning_marks.start
        if body.startswith(start):
            self._held, self._state, self._strip = body[len(start) :], self._reasoning, True
        elif last or not start.startswith(body):
            self._state, self._strip = self._content, False
        return MessageDelta()

    def _reasoning(self, last: bool) -> MessageDelta:
        text, found = self._until((self._reasoning_marks.end,), last)
        if found:
            self._held = self._held[len(found) :]
            self._state, self._strip = self._content, True
        return MessageDelta(reasoning=text)

    def _content(self, last: bool) -> MessageDelta:
        if not self._tools:
            text, self._held = self._unstripped(self._held), ""
            return MessageDelta(content=text)
        text, found = self._until(self._format.triggers, last)
        if found and self._format.only_first and (self.message.content + text).strip():
            self._tools = {}  # the rest is text
            return MessageDelta(content=text + self._gap)
        if found:
            self._reader = self._format.reader(self._tools)
            self._state = self._call
        return MessageDelta(content=text)

    def _call(self, last: bool) -> MessageDelta:
        """Parse a possible call, from its trigger on."""
        assert self._reader is not None, "a trigger was found"
        found = self._reader.push(self._held, last=last)
        self._held = ""
        calls: list[CallDelta] = []
        index = len(self.message.calls) - 1
        for piece in found.pieces:
            index += piece.name is not None
            calls.append(CallDelta(index, piece.name, piece.arguments))
        if found.rest is not None:
            self._held, self._state, self._strip = found.rest, self._content, not found.text
        content = self._gap + found.text if found.text else ""
        return MessageDelta(content=content, calls=tuple(calls))

    def _until(self, tags: tuple[str, ...], last: bool) -> tuple[str, str]:
        """Return the text before the first of ``tags`` and the tag found, which stays held.

        If no tag is found, text that may begin a tag stays held.

        Blanks before a tag are not part of the text. They are held until more text arrives.
        """
        held = self._held
        places = {held.find(tag): tag for tag in tags}
        if stop := [place for place in places if place >= 0]:
            text, self._held = self._unstripped(held[: min(stop)]), held[min(stop) :]
            self._gap = text[len(text.rstrip()) :]
            return text.rstrip(), places[min(stop)]
        if last:
            self._held = ""
            dropped = self._strip and not held.strip()
            return ("" if dropped else self._unstripped(held)), ""
        cut = len(held[: len(held) - max(_overlap(held, tag) for tag in tags)].rstrip())
        self._held = held[cut:]
        return self._unstripped(held[:cut]), ""

    def _unstripped(self, text: str) -> str:
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        return text


def _overlap(text: str, tag: str) -> int:
    """Count the characters at the end of ``text`` that may begin ``tag``."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((n for n in sizes if tag.startswith(text[-n:])), 0)


def _merged(calls: tuple[CallDelta, ...]) -> tuple[CallDelta, ...]:
    """Merge adjacent deltas of the same call."""
    merged: list[CallDelta] = []
    for call in calls:
        if merged and merged[-1].index == call.index:
            arguments = merged[-1].arguments + call.arguments
            merged[-1] = CallDelta(call.index, merged[-1].name, arguments)
        else:
            merged.append(call)
    return tuple(merged)
