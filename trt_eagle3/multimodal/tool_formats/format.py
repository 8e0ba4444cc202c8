"""ToolFormat: how a checkpoint writes tool calls, with a reader and a grammar of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from trt_eagle3.multimodal.tool_formats.parts import Content
from trt_eagle3.multimodal.tools import Tool

__all__ = ["CallGrammar", "CallPiece", "CallProgress", "CallReader", "ToolFormat"]


@dataclass(frozen=True)
class CallPiece:
    """What a piece of text adds to a call.

    Attributes:
        name: the function's name in the piece that begins the call; else None.
        arguments: the next part of the arguments' JSON text.
    """

    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class CallProgress:
    """The result of reading a piece of text.

    Attributes:
        pieces: of the call.
        text: plain text, if this is not a call: the trigger at least. ``pieces`` is empty then.
        rest: the text after the call, or after ``text``. None: more text is needed.
    """

    pieces: tuple[CallPiece, ...] = ()
    text: str = ""
    rest: str | None = None


class CallReader(Protocol):
    """Reads one call, from its trigger on."""

    def push(self, text: str, *, last: bool) -> CallProgress:
        """Read the next piece. ``last``: the answer ends with ``text``."""
        ...


@dataclass(frozen=True)
class CallGrammar:
    """The form of a call.

    Attributes:
        begin: literal text; it starts with the format's first trigger.
        content: JSON Schema as JSON text, or parts.
        end: literal text.
    """

    begin: str
    content: Content
    end: str


class ToolFormat(Protocol):
    """A format of tool calls."""

    @property
    def name(self) -> str:
        """The name in ``serve --tool-format``."""
        ...

    @property
    def triggers(self) -> tuple[str, ...]:
        """The texts that a call may begin with. Constrained calls begin with the first."""
        ...

    @property
    def takes_text_arguments(self) -> bool:
        """Whether a chat template of this format may take the arguments of past calls as JSON
        text. Otherwise it takes mappings only.
        """
        ...

    def is_taught(self, text: str) -> bool:
        """Whether a prompt or a chat template teaches this format."""
        ...

    def reader(self, tools: Mapping[str, Tool]) -> CallReader:
        """Make a reader of one call. ``tools``: by name."""
        ...

    def grammar(self, tool: Tool, *, strict: bool) -> CallGrammar:
        """The form of a call of ``tool``.

        Args:
            strict: the arguments must match their schema; otherwise any arguments are allowed.

        Raises:
            UserError: this format cannot express the schema.
        """
        ...
