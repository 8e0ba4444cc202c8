"""ToolFormat: how checkpoints write calls of tools, and what reads and constrains them."""

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
        name: of the function, where the call begins here; else None.
        arguments: what is added to the JSON text of the arguments.
    """

    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class CallProgress:
    """What a reader made of a piece of text.

    Attributes:
        pieces: of the call.
        text: what is text, as it is no call: the trigger, at least. There are no ``pieces`` then.
        rest: what stands behind the call, or behind ``text``; None: more text is needed.
    """

    pieces: tuple[CallPiece, ...] = ()
    text: str = ""
    rest: str | None = None


class CallReader(Protocol):
    """Reads one call, from its trigger on."""

    def push(self, text: str, *, last: bool) -> CallProgress:
        """Read on. ``last``: the answer ends with ``text``."""
        ...


@dataclass(frozen=True)
class CallGrammar:
    """What a call must look like: ``begin``, which the format's first trigger begins; ``content``:
    JSON Schema as JSON text, or parts; ``end``.
    """

    begin: str
    content: Content
    end: str


class ToolFormat(Protocol):
    """A format of calls."""

    @property
    def name(self) -> str:
        """What ``serve --tool-format`` calls it."""
        ...

    @property
    def triggers(self) -> tuple[str, ...]:
        """The texts that a call may begin with. Calls that are constrained begin with the first."""
        ...

    @property
    def takes_text_arguments(self) -> bool:
        """Whether a chat template of this format may take arguments of past calls as JSON text;
        else it takes mappings only.
        """
        ...

    def is_taught(self, text: str) -> bool:
        """Whether a prompt or a chat template teaches this format."""
        ...

    def reader(self, tools: Mapping[str, Tool]) -> CallReader:
        """A reader of one call of ``tools``, by name."""
        ...

    def grammar(self, tool: Tool, *, strict: bool) -> CallGrammar:
        """What a call of ``tool`` must look like. ``strict``: its arguments match their schema;
        else they may be any.

        Raises:
            UserError: this format cannot express the schema.
        """
        ...
