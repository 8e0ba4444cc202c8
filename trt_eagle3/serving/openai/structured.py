"""Read structured output: OpenAI's ``response_format`` and vLLM's fields as a ``Grammar``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from trt_eagle3.decode.sampling.grammar import Grammar
from trt_eagle3.errors import quote
from trt_eagle3.serving.errors import FieldError

__all__ = ["StructuredFields", "read_format", "read_grammar"]

_PARTS = ("json", "json_object", "regex", "choice", "grammar")


class StructuredFields(BaseModel):
    """Fields that constrain the answer's form; at most one may be set."""

    response_format: dict[str, Any] | None = None

    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def read_grammar(fields: StructuredFields) -> Grammar | None:
    """Return the grammar that ``fields`` request.

    Raises:
        UserError: two of them at once, an unknown type, or no schema, pattern or grammar.
    """
    found = [grammar for grammar in _grammars(fields) if grammar is not None]
    if len(found) > 1:
        raise FieldError(
            f"{found[1].field}: expected one constraint, but {found[0].field} is set too. Leave "
            "one of them out.",
            found[1].field,
        )
    return found[0] if found else None


def _grammars(fields: StructuredFields) -> list[Grammar | None]:
    guided = {part: getattr(fields, f"guided_{part}", None) for part in _PARTS}
    return [
        read_format(fields.response_format, "response_format"),
        *(_read_part(part, value, f"guided_{part}") for part, value in guided.items()),
        *_read_outputs(fields.structured_outputs),
    ]


def read_format(raw: Any, where: str) -> Grammar | None:
    """Read OpenAI's ``{"type": "text" | "json_object" | "json_schema", ...}``.

    The schema is inside ``json_schema``, or beside the type as in ``/v1/responses``.
    """
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise FieldError(f"{where}: expected an object, got {quote(raw, 80)}", where)
    match raw.get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar.json_object(where)
        case "json_schema":
            holder = raw.get("json_schema", raw)
            schema = holder.get("schema") if isinstance(holder, Mapping) else None
            if not isinstance(schema, Mapping | bool):
                raise FieldError(
                    f"{where}: json_schema: expected a schema, got {quote(schema, 80)}", where
                )
            return Grammar.json_schema(schema, where)
        case "regex" | "grammar" as kind:
            return _read_part(kind, raw.get("pattern", raw.get("grammar")), where)
        case kind:
            raise FieldError(
                f"{where}.type: expected text, json_object or json_schema, got {quote(kind, 80)}",
                f"{where}.type",
            )


def _read_outputs(raw: Mapping[str, Any] | None) -> list[Grammar | None]:
    """Read vLLM's ``structured_outputs``."""
    given = {} if raw is None else {name: v for name, v in raw.items() if v is not None}
    for name in given:
        if name not in _PARTS:
            raise FieldError(
                f"structured_outputs.{name:.40}: expected one of {', '.join(_PARTS)}",
                "structured_outputs",
                "unknown_parameter",
            )
    return [_read_part(part, v, "structured_outputs") for part, v in given.items()]


def _read_part(part: str, value: Any, field: str) -> Grammar | None:
    if value is None or value is False:
        return None
    if part == "json":
        return Grammar.json_schema(value, field)
    if part == "json_object":
        return Grammar.json_object(field)
    if part == "choice":
        return Grammar.choice(value, field)
    return Grammar.regex(value, field) if part == "regex" else Grammar.ebnf(value, field)
