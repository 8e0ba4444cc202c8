"""Parts that make up the grammar of a tool call.

A ``decode.sampling.grammar.Grammar`` holds them in their JSON form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Content",
    "Either",
    "JsonPart",
    "ParametersPart",
    "Part",
    "Repeated",
    "TextPart",
    "part_form",
]


@dataclass(frozen=True)
class JsonPart:
    """A JSON value. ``schema``: JSON Schema, as JSON text."""

    schema: str


@dataclass(frozen=True)
class TextPart:
    """A text and the literal that ends it.

    Attributes:
        matching: regular expressions (Rust's syntax). Each must match the whole text.
        excluding: regular expressions. None may match the whole text.
        end: literal text after the text.
    """

    matching: tuple[str, ...]
    excluding: tuple[str, ...] = ()
    end: str = ""


@dataclass(frozen=True)
class Either:
    """One of several sequences of parts."""

    options: tuple[tuple[Part, ...], ...]


@dataclass(frozen=True)
class Repeated:
    """A sequence of parts, repeated any number of times. ``once``: at most once."""

    parts: tuple[Part, ...]
    once: bool = False


@dataclass(frozen=True)
class ParametersPart:
    """The parameters of a call in Qwen3's XML format (``qwen3_xml_grammar.py``).

    The process that tests grammars expands them.

    Attributes:
        tool: the function's name, for errors.
        schema: JSON Schema of its arguments, as JSON text.
    """

    tool: str
    schema: str


Part = str | JsonPart | TextPart | Either | Repeated | ParametersPart
"""A ``str`` is literal text."""
Content = str | tuple[Part, ...]
"""JSON Schema as JSON text, or parts."""


def part_form(parts: Sequence[Part]) -> list[Any]:
    """Convert ``parts`` to their JSON form."""
    return [_form(part) for part in parts]


def _form(part: Part) -> Any:
    match part:
        case str():
            return part
        case JsonPart(schema):
            return {"json": schema}
        case TextPart(matching, excluding, end):
            return {"text": list(matching), "excluding": list(excluding), "end": end}
        case Either(options):
            return {"any": [part_form(option) for option in options]}
        case Repeated(inner, once):
            return {"repeated": part_form(inner), "once": once}
        case ParametersPart(tool, schema):
            return {"tool": tool, "parameters": schema}
