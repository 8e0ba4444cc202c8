"""ToolFormat: a checkpoint's format of tool calls, with a reader and a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from trt_eagle3.multimodal.tool_formats.parts import Content
from trt_eagle3.multimodal.tools import Tool

__all__ = ["CallGrammar", "CallPiece", "CallProgress", "CallReader", "ToolFormat"]


@dataclass(frozen=True)
class CallPiece:
    """The call fragment that a piece of text adds.

    Attributes:
        name: function name, in the first piece of a call; else None.
        arguments: next fragment of the arguments' JSON text.
    """

    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class CallProgress:
    """The result of reading a piece of text.

    Attributes:
        pieces: fragments of the call.
        text: content, at least the trigger, if this is not a call. ``pieces`` is empty then.
        rest: the text after the call, or after ``text``. None: more text is needed.
    """

    pieces: tuple[CallPiece, ...] = ()
    text: str = ""
    rest: str | None = None


class CallReader(Protocol):
    """Read one call, from its trigger on."""

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
        """Texts that a call may begin with. Constrained calls begin with the first."""
        ...

    @property
    def takes_text_arguments(self) -> bool:
        """Whether chat templates of this format accept the arguments of past calls as JSON text.

        Otherwise they accept mappings only.
        """
        ...

    @property
    def only_first(self) -> bool:
        """Whether calls come before any text of an answer. After text, a trigger is text."""
        ...

    def is_taught(self, text: str) -> bool:
        """Return whether a prompt or a chat template teaches this format."""
        ...

    def reader(self, tools: Mapping[str, Tool]) -> CallReader:
        """Create a reader of one call. ``tools``: by name."""
        ...

    def grammar(self, tool: Tool, *, strict: bool) -> CallGrammar:
        """Return the form of a call of ``tool``.

        Args:
            strict: the arguments must match their schema; otherwise any arguments are allowed.

        Raises:
            UserError: this format cannot express the schema.
        """
        ...
