"""Whether any JSON value of finite size is valid by a schema: a schema may demand itself inside
itself, and an answer with it would never end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

__all__ = ["never_ends"]

_MAX_PASSES = 32  # over all places that are referred to; more are not judged


def never_ends(schema: Any) -> bool:
    """Whether every value that ``schema`` allows holds another that it demands, without end.

    Only what demands parts is looked at: required properties, items of lists that may not be
    empty, and references. What else contradicts itself is the grammar's to say.
    """
    places = {
        ref: found for ref in set(_references(schema)) if (found := _at(schema, ref)) is not None
    }
    ending: set[str] = set()
    for _ in range(_MAX_PASSES):
        more = {r for r, part in places.items() if r not in ending and _ends(part, ending, places)}
        ending |= more
        if not more:
            return not _ends(schema, ending, places)
    return False


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for part in schema.values():
            yield from _references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def _at(schema: Any, reference: str) -> Any:
    """What a reference within the schema points at; None where it is of another kind."""
    if not reference.startswith("#"):
        return None
    found = schema
    for part in reference[1:].split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found


def _ends(schema: Any, ending: Collection[str], places: Mapping[str, Any]) -> bool:
    """Whether a value of it may be finite, if those of the references ``ending`` may."""
    if not isinstance(schema, Mapping):
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference in places and reference not in ending:
        return False
    choices = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
    return all(any(_ends(part, ending, places) for part in parts) for parts in choices) and all(
        _ends(part, ending, places) for part in _demanded(schema)
    )


def _demanded(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas of parts that every value has."""
    every = schema.get("allOf")
    yield from every if isinstance(every, list) else ()
    if schema.get("type") in ("object", ["object"]):
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, Mapping) and isinstance(required, list):
            yield from (properties.get(str(name)) for name in required)
    if schema.get("type") in ("array", ["array"]) and schema.get("minItems"):
        yield schema.get("items")
