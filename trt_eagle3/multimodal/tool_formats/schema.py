"""JSON Schemas of arguments: the types that a schema allows, and the value that a text means."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NoReturn
from urllib.parse import unquote

from trt_eagle3.errors import UserError, clip

__all__ = [
    "Find",
    "Parameters",
    "combined",
    "json_from_text",
    "named_types",
    "referenced",
    "resolve",
    "schema_text",
    "standalone",
    "types_of",
]

_MAX_REFERENCES = 32  # in a chain; a longer chain is treated as a cycle
_MAX_PARTS = 4096  # parts searched for types; all answers wait for the search
_MAX_INDEX_LEN = 9  # digits
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Chat templates write past JSON values in this form (``| string``), so models do too."""
_TYPE_NAMES: Mapping[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
Schema = Mapping[str, Any]
Find = Callable[[str], Any]
"""Return the target of a reference; None if it is outside the schema."""


class Parameters:
    """The parameters of a function, from the schema of its arguments.

    Attributes:
        find: returns the target of a reference in the schema.
        arguments: the schema of the arguments themselves.
    """

    def __init__(self, root: Schema) -> None:
        self.find: Find = cache(lambda reference: referenced(root, reference))
        self.arguments = resolve(root, self.find)

    @property
    def names(self) -> Mapping[str, Any]:
        """The parameters that the schema names, with their schemas."""
        named = self.arguments.get("properties")
        return named if isinstance(named, Mapping) else {}

    def schema(self, name: str) -> Any:
        """Return the schema of a parameter; of an unnamed one, ``additionalProperties``."""
        return self.names.get(name, self.arguments.get("additionalProperties"))

    def types(self, name: str) -> frozenset[str]:
        """Return the JSON types that a parameter may have; a string if the schema has none."""
        return types_of(self.schema(name), self.find)


def types_of(schema: Any, find: Find) -> frozenset[str]:
    """Return the JSON types that ``schema`` allows.

    Only its first parts are read. A schema that names no type allows a string.
    """
    found: set[str] = set()
    todo, seen = [schema], set[int]()
    for _ in range(_MAX_PARTS):
        if not todo:
            break
        part = resolve(todo.pop(), find)
        if part and id(part) not in seen:
            seen.add(id(part))
            found |= named_types(part)
            todo += combined(part)
    return frozenset(found or {"string"})


def combined(schema: Schema) -> list[Any]:
    """Return the schemas that ``schema`` combines."""
    lists = (schema.get(key) for key in ("anyOf", "oneOf", "allOf"))
    return [part for parts in lists if isinstance(parts, list) for part in parts]


def schema_text(schema: Any) -> str:
    """Convert a schema to JSON text.

    Raises:
        UserError: it contains NaN or an infinite number, or is nested too deep.
    """
    try:
        return json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"tools: a schema is not JSON ({clip(error)}).") from error


def _type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    return _TYPE_NAMES.get(type(value), "none of JSON")


def resolve(schema: Any, find: Find) -> Schema:
    """Return ``schema``, or the target of its reference; empty if that is not an object."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        if not isinstance(schema.get("$ref"), str):
            return schema
        schema = find(schema["$ref"])
    return {}


def standalone(schema: Any, find: Find) -> Any:
    """Copy the targets of a schema's references to its own ``$defs``.

    A part is copied once per reference, so call this only in a bounded process.
    """
    names: dict[str, str] = {}  # by reference
    todo: list[str] = []

    def renamed(part: Any) -> Any:
        if isinstance(part, list):
            return [renamed(item) for item in part]
        if not isinstance(part, Mapping):
            return part
        own = {key: renamed(value) for key, value in part.items() if key != "$defs"}
        reference = part.get("$ref")
        if isinstance(reference, str) and find(reference) is not None:
            if reference not in names:
                names[reference] = f"d{len(names)}"
                todo.append(reference)
            own["$ref"] = f"#/$defs/{names[reference]}"
        return own

    whole, found = renamed(schema), {}
    while todo:
        reference = todo.pop()
        found[names[reference]] = renamed(find(reference))
    return {**whole, "$defs": found} if found else whole


def json_from_text(text: str, types: frozenset[str]) -> str:
    """Return JSON text of the value that ``text`` means for a parameter of ``types``.

    A text that is not a value of another type is a string, even if ``types`` has no string. So the
    argument is kept, and the client can reject it.
    """
    bare = text.strip()
    bare = _PYTHON.get(bare, bare)
    if bare == "null" and ("null" in types or "string" not in types):
        return bare
    for reading, value in _readings(bare, containers=bool(types & {"object", "array"})):
        found = _type_of(value)
        if found == "number" and "integer" in types and value.is_integer():
            return str(int(value))
        if found in types - {"string"} or (found == "integer" and "number" in types):
            return reading
    return json.dumps(text, ensure_ascii=False)


def _readings(text: str, *, containers: bool) -> Iterator[tuple[str, Any]]:
    """Yield JSON texts that ``text`` may mean, and their values.

    ``containers``: also read objects and arrays that are encoded twice or in Python's syntax.
    """
    with contextlib.suppress(ValueError, RecursionError):
        value = _json(text)
        yield text, value
        if containers and isinstance(value, str):
            text = value
            yield text, _json(text)
    if containers and text.startswith(("{", "[")):
        with contextlib.suppress(*_NO_LITERAL):
            literal = ast.literal_eval(text)
            yield json.dumps(literal, ensure_ascii=False, allow_nan=False), literal


_NO_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


def _json(text: str) -> Any:
    """Parse JSON text.

    Raises:
        ValueError: the text is not JSON. NaN and Infinity are not JSON.
    """
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def named_types(schema: Schema) -> set[str]:
    """Return the types that ``schema`` names itself, without references."""
    nullable = {"null"} if schema.get("nullable") is True else set()
    if "const" in schema:
        return {_type_of(schema["const"])} | nullable
    if isinstance(schema.get("enum"), list):
        return set(map(_type_of, schema["enum"])) | nullable
    named = schema.get("type")
    listed = named if isinstance(named, list) else [named]
    types = {name for name in listed if isinstance(name, str)}
    if not types and ("properties" in schema or "additionalProperties" in schema):
        types = {"object"}
    if not types and ("items" in schema or "prefixItems" in schema):
        types = {"array"}
    return types | nullable


def referenced(root: Any, reference: str) -> Any:
    """Return the target of a reference within ``root``; None if it points elsewhere."""
    if not reference.startswith("#"):
        return None
    found = root
    for part in reference[1:].split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            index = int(name) if name.isdecimal() and len(name) <= _MAX_INDEX_LEN else len(found)
            if index >= len(found):
                return None
            found = found[index]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return None
    return found
