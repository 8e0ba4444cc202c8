"""Grammar: what an answer must look like, as a request states it."""

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
"""Of a schema, pattern or grammar; larger ones are refused unread."""


@dataclass(frozen=True)
class StructuralTag:
    """A part of an answer that stands between two texts: a call of a tool, above all.

    Attributes:
        begin, end: the texts around it, ``begin`` with the grammar's ``trigger`` at its start.
        content: what stands between them: JSON Schema as JSON text, or parts
            (``multimodal.tool_formats.parts``).
    """

    begin: str
    content: Content
    end: str

    def to_form(self) -> list[Any]:
        """Its JSON form."""
        content = self.content
        return [
            self.begin,
            content if isinstance(content, str) else part_form(content),
            self.end,
        ]


@dataclass(frozen=True)
class Grammar:
    """What an answer must look like. Made by the class methods below.

    Attributes:
        kind: how ``source`` is to be read. source: JSON Schema, regular expression, JSON list of
            texts, Lark or GBNF grammar, or, of tags, their JSON form.
        field: what a request calls it; errors name it.
        after: free text goes before it, up to and with this text (``</think>``); empty: nothing.
    Raises:
        UserError: a value of another type, an empty or too large one, by the name of its field.
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
        """JSON that ``schema`` allows: JSON Schema, read or as text, or a Pydantic model class."""
        return cls("json_schema", _json_text(schema, field), field)

    @classmethod
    def json_object(cls, field: str = "response_format") -> Grammar:
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}', field)

    @classmethod
    def regex(cls, pattern: str, field: str = "regex") -> Grammar:
        """A text that ``pattern`` (Rust's syntax: no look-around, no back references) matches as a
        whole.
        """
        return cls("regex", pattern, field)

    @classmethod
    def choice(cls, choices: Sequence[str], field: str = "choice") -> Grammar:
        """One of ``choices``, nothing else."""
        texts = list(choices) if isinstance(choices, list | tuple) else []
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise UserError(f"{field}: expected a list of texts that are not empty")
        return cls("choice", json.dumps(texts), field)

    @classmethod
    def ebnf(cls, text: str, field: str = "grammar") -> Grammar:
        """A context-free grammar: Lark's syntax (rule ``start``), or GBNF (rule ``root``)."""
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
        """Free text in which ``trigger`` stands only where one of ``tags`` begins.

        Args:
            never: texts that the free text may not contain.
            required: nothing but tags, at least one. parallel: more than one tag is allowed.
            answer: JSON Schema of what may stand in place of required tags, as JSON text.
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
        """The same behind free text that ends with ``text``: a Thinking checkpoint's
        ``</think>``.
        """
        return replace(self, after=text)


def is_model_class(value: object) -> TypeGuard[type[Any]]:
    """Return whether ``value`` is a Pydantic model class; Pydantic need not be imported."""
    return isinstance(value, type) and callable(getattr(value, "model_json_schema", None))


def _check_size(size: int, field: str) -> None:
    if size > MAX_SOURCE_BYTES:
        raise UserError(f"{field}: {size} bytes, at most {MAX_SOURCE_BYTES} are read. Send less.")


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
