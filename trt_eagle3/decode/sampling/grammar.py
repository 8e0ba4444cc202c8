"""Grammar: the form that a request demands of its answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeGuard

from trt_eagle3.errors import UserError, clip
from trt_eagle3.multimodal.tool_formats.parts import Content, part_form

__all__ = ["MAX_SOURCE_BYTES", "Grammar", "GrammarKind", "StructuralTag", "is_model_class"]

GrammarKind = Literal["json_schema", "regex", "choice", "ebnf", "tags"]

MAX_SOURCE_BYTES = 256 << 10
"""Largest schema, pattern or grammar; larger ones are refused before they are parsed."""


@dataclass(frozen=True)
class StructuralTag:
    """A part of an answer between two texts, usually a tool call.

    Attributes:
        begin, end: the texts around it. ``begin`` starts with the grammar's ``trigger``.
        content: the form of the text between them: JSON Schema as JSON text, or parts
            (``multimodal.tool_formats.parts``).
    """

    begin: str
    content: Content
    end: str

    def to_form(self) -> list[Any]:
        """Convert to its JSON form."""
        content = self.content
        return [
            self.begin,
            content if isinstance(content, str) else part_form(content),
            self.end,
        ]


@dataclass(frozen=True)
class Grammar:
    """The form of an answer. Use the class methods below to make one.

    Attributes:
        kind: type of ``source``.
        source: JSON Schema, regular expression, JSON list of texts, Lark or GBNF grammar, or the
            JSON form of tags.
        field: its name in the request, for error messages.
        after: text that ends the free text before the grammar, such as ``</think>``; empty: no free
            text before it.
    Raises:
        UserError: a value is of another type, empty or too large; names the field.
    """

    kind: GrammarKind
    source: str
    field: str = "grammar"
    after: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source:
            raise UserError(f"{self.field}: expected a text that is not empty")
        _check_size(len(self.source.encode("utf-8", "surrogatepass")), self.field)

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | bool | str | type[Any], field: str = "json_schema"
    ) -> Grammar:
        """Allow JSON that satisfies ``schema``: JSON Schema, parsed or as text, or a Pydantic model
        class.
        """
        return cls("json_schema", _json_text(schema, field), field)

    @classmethod
    def json_object(cls, field: str = "response_format") -> Grammar:
        """Allow any JSON object."""
        return cls("json_schema", '{"type": "object"}', field)

    @classmethod
    def regex(cls, pattern: str, field: str = "regex") -> Grammar:
        """Allow a text that ``pattern`` matches as a whole.

        The syntax is Rust's: no look-around, no back references.
        """
        return cls("regex", pattern, field)

    @classmethod
    def choice(cls, choices: Sequence[str], field: str = "choice") -> Grammar:
        """Allow exactly one of ``choices``."""
        texts = list(choices) if isinstance(choices, list | tuple) else []
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise UserError(f"{field}: expected a list of texts that are not empty")
        return cls("choice", json.dumps(texts), field)

    @classmethod
    def ebnf(cls, text: str, field: str = "grammar") -> Grammar:
        """Allow a context-free grammar: Lark's syntax (rule ``start``), or GBNF (rule ``root``)."""
        return cls("ebnf", text, field)

    @classmethod
    def structural_tags(
        cls,
        tags: Iterable[StructuralTag],
        *,
        trigger: str,
        never: Sequence[str] = (),
        required: bool = False,
        parallel: bool = True,
        answer: str | None = None,
        field: str = "tools",
    ) -> Grammar:
        """Allow free text in which ``trigger`` occurs only at the start of one of ``tags``.

        Args:
            never: texts that the free text must not contain.
            required: allow only tags, at least one. parallel: allow more than one tag.
            answer: JSON Schema, as JSON text, of an answer that may replace the required tags.
        """
        forms: list[list[Any]] = []
        size = 0
        for tag in tags:  # checked one by one: stops at the first excess
            forms.append(tag.to_form())
            size += len(json.dumps(forms[-1]))
            _check_size(size, field)
        if not forms or not trigger or not all(form[0].startswith(trigger) for form in forms):
            raise UserError(f"{field}: expected tags that begin with {trigger!r:.40}")
        form = {
            "trigger": trigger,
            "never": list(never),
            "required": required,
            "parallel": parallel,
            "answer": answer,
            "tags": forms,
        }
        return cls("tags", json.dumps(form), field)

    def preceded_by(self, text: str) -> Grammar:
        """Return the same grammar after free text that ends with ``text``.

        A Thinking checkpoint's text is ``</think>``.
        """
        return replace(self, after=text)


def is_model_class(value: object) -> TypeGuard[type[Any]]:
    """Return whether ``value`` is a Pydantic model class; Pydantic need not be imported."""
    return isinstance(value, type) and callable(getattr(value, "model_json_schema", None))


def _check_size(size: int, field: str) -> None:
    if size > MAX_SOURCE_BYTES:
        raise UserError(f"{field}: {size} bytes, expected at most {MAX_SOURCE_BYTES}. Send less.")


def _json_text(value: object, field: str) -> str:
    if isinstance(value, str):
        return value
    if is_model_class(value):
        model = value
        try:
            value = model.model_json_schema()
        except Exception as error:  # a field of a type that JSON Schema cannot express
            raise UserError(
                f"{field}: {model.__name__}: no JSON Schema can be made of it ({clip(error)})"
            ) from error
    if not isinstance(value, Mapping | bool):
        raise UserError(f"{field}: expected a JSON Schema, got {type(value).__name__}")
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{field}: not a JSON value ({type(error).__name__})") from error
