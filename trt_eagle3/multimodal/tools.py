"""Tools: functions that a model may call, and past calls in the form of chat templates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trt_eagle3.errors import UserError, quote
from trt_eagle3.multimodal.call_arguments import read_arguments

__all__ = ["MAX_TOOLS", "Tool", "read_tools", "template_calls"]

MAX_TOOLS = 128
"""Maximum number of tools of one request, as at OpenAI."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_MAX_DEPTH = 48


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of the arguments, an object.
        strict: whether every call must match ``parameters``, even if ``tool_choice`` lets the model
            decide whether to call.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    strict: bool = False

    @property
    def arguments(self) -> Mapping[str, Any]:
        """JSON schema that a call must match.

        As at OpenAI, ``parameters`` without any named argument allow no argument.
        """
        if dict(self.parameters) == {"type": "object", "properties": {}}:
            return {**self.parameters, "additionalProperties": False}
        return self.parameters

    def to_template(self) -> dict[str, Any]:
        """Return OpenAI's object, the form that chat templates read."""
        described = {"description": self.description} if self.description else {}
        function = {"name": self.name, **described, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def read_tools(raw: Sequence[Any]) -> tuple[Tool, ...]:
    """Check and read OpenAI's ``tools``.

    ``[{"type": "function", "function": {"name", "description", "parameters", "strict"}}]``

    Raises:
        UserError: there are more than ``MAX_TOOLS``, a type is unknown, a name is invalid or
            repeated, or parameters are not the JSON schema of an object.
    """
    if len(raw) > MAX_TOOLS:
        raise UserError(f"tools: {len(raw)} of them, the limit is {MAX_TOOLS}. Offer fewer.")
    tools: list[Tool] = []
    for i, value in enumerate(raw):
        tool = _read_tool(value, f"tools[{i}]")
        taken = next((j for j, other in enumerate(tools) if other.name == tool.name), None)
        if taken is not None:
            raise UserError(
                f"tools[{i}].function.name: {tool.name!r} is the name of tools[{taken}] too. "
                "Rename one."
            )
        tools.append(tool)
    return tuple(tools)


def _read_tool(value: Any, where: str) -> Tool:
    if not isinstance(value, Mapping) or value.get("type", "function") != "function":
        raise UserError(
            f'{where}: expected {{"type": "function", "function": {{...}}}}, got {quote(value, 80)}'
        )
    function = value.get("function")
    if not isinstance(function, Mapping):
        raise UserError(f"{where}.function: expected an object, got {quote(function, 80)}")
    name, where = function.get("name"), f"{where}.function"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"{where}.name: expected 1 to 64 letters, digits, '_', '.' or '-', got "
            f"{quote(name, 80)}"
        )
    description, strict = function.get("description") or "", function.get("strict") or False
    if not isinstance(description, str):
        raise UserError(f"{where}.description: expected a text, got {quote(description, 80)}")
    if not isinstance(strict, bool):
        raise UserError(f"{where}.strict: expected true or false, got {quote(strict, 80)}")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    _check_schema(parameters, f"{where}.parameters", 0)
    if isinstance(parameters, bool) or parameters.get("type", "object") != "object":
        raise UserError(
            f'{where}.parameters: expected a schema of type "object", got {quote(parameters, 80)}'
        )
    return Tool(name, description, parameters, strict)


def _check_schema(schema: Any, where: str, depth: int) -> None:
    """Check that ``schema`` is a JSON schema. The grammar checks the supported keywords."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise UserError(f"{where}: expected a JSON schema, got {quote(schema, 80)}")
    if depth > _MAX_DEPTH:
        raise UserError(f"{where}: a schema nested deeper than {_MAX_DEPTH} levels. Flatten it.")
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if not isinstance(name, str) or name not in _TYPES:
            known = ", ".join(sorted(_TYPES))
            raise UserError(f"{where}.type: expected one of {known}, got {quote(name, 80)}")
    if not isinstance(schema.get("$ref", ""), str):
        raise UserError(f"{where}.$ref: expected a text, got {quote(schema['$ref'], 80)}")
    if not isinstance(schema.get("required", []), list):
        raise UserError(f"{where}.required: expected a list, got {quote(schema['required'], 80)}")
    if schema.get("enum", [None]) == [] or not isinstance(schema.get("enum", []), list):
        raise UserError(f"{where}.enum: expected a list of values, got {quote(schema['enum'], 80)}")
    for part, where_part in _parts(schema, where):
        _check_schema(part, where_part, depth + 1)


def _parts(schema: Mapping[str, Any], where: str) -> list[tuple[Any, str]]:
    """Return the schemas inside a schema, with their paths."""
    parts = [(schema[key], f"{where}.{key}") for key in ("items", "not") if key in schema]
    for key in _NAMED_SCHEMAS:
        named = schema.get(key, {})
        if not isinstance(named, Mapping):
            raise UserError(f"{where}.{key}: expected an object, got {quote(named, 80)}")
        parts += [(part, f"{where}.{key}.{name:.40}") for name, part in named.items()]
    for key in _LISTS_OF_SCHEMAS:
        listed = schema.get(key, [])
        if not isinstance(listed, list):
            raise UserError(f"{where}.{key}: expected a list, got {quote(listed, 80)}")
        parts += [(part, f"{where}.{key}[{i}]") for i, part in enumerate(listed)]
    return parts


def template_calls(calls: Any, where: str, *, as_text: bool) -> list[dict[str, Any]]:
    """Convert ``tool_calls`` of a past assistant message to the form of a chat template.

    Args:
        where: path of the calls in errors.
        as_text: keep text arguments unchanged, even truncated ones. Otherwise parse them into an
            object, and repair truncated ones.
    Raises:
        UserError: this is not a list of calls, or arguments do not begin a JSON object.
    """
    if not isinstance(calls, list):
        raise UserError(f"{where}: expected a list of calls, got {quote(calls, 80)}")
    return [_template_call(call, f"{where}[{i}]", as_text) for i, call in enumerate(calls)]


def _template_call(call: Any, where: str, as_text: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(
            f'{where}: expected {{"function": {{"name", "arguments"}}}}, got {quote(call, 80)}'
        )
    given = function.get("arguments")
    arguments = read_arguments(given or "") if isinstance(given, str | None) else given
    if not isinstance(arguments, Mapping):
        raise UserError(
            f"{where}.function.arguments: expected the text of a JSON object, got "
            f"{quote(given, 80)}"
        )
    kept = given if as_text and isinstance(given, str) and given.strip() else arguments
    given_keys = {name: value for name, value in call.items() if value is not None}
    return {**given_keys, "type": "function", "function": {**function, "arguments": kept}}
