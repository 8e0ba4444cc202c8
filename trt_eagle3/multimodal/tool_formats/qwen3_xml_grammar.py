"""Build the grammar of a function's parameters in Qwen3's XML format.

A value that can only be a string is plain text. A value that cannot be a string is JSON. If the
schema allows both, the grammar excludes texts that would be read as a restricted other type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from trt_eagle3.errors import UserError, quote
from trt_eagle3.multimodal.tool_formats.parts import (
    Either,
    JsonPart,
    Part,
    Repeated,
    TextPart,
    part_form,
)
from trt_eagle3.multimodal.tool_formats.schema import (
    Find,
    Parameters,
    combined,
    json_from_text,
    named_types,
    resolve,
    schema_text,
    standalone,
    types_of,
)

__all__ = ["any_parameters", "call_parameters"]

_CLOSING = "\n</parameter>\n"
_MAX_BYTES = 256 << 10  # of a tool's schemas, including references
_MAX_ALTERNATIVES = 64  # per parameter's schema
_ANYTHING = r"(.|\n)*"
_NO_CLOSING = r"(.|\n)*<\/parameter>(.|\n)*"
_NAME = r"[^<>\n]{1,64}"
_SPACE = r"[ \t\r\n]*"
_NUMBER = rf"{_SPACE}-?[0-9](.|\n)*"
_READS_AS: Mapping[str, str] = {
    "null": rf"{_SPACE}(null|None){_SPACE}",
    "boolean": rf"{_SPACE}(true|false|True|False){_SPACE}",
    "integer": _NUMBER,
    "number": _NUMBER,
    "object": rf"{_SPACE}[\x7b\x22](.|\n)*",
    "array": rf"{_SPACE}[\x5b\x22](.|\n)*",
}
"""By type: texts that the reader may parse as a value of that type."""
_WRITTEN: Mapping[str, str] = {
    "null": "null",
    "boolean": "true|false",
    "integer": "-?(0|[1-9][0-9]{0,14})",
    "number": r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,14})?",
}
"""By type: the form of values if every value of the type is allowed."""
_BOUNDS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const"}
)
_OF_ARGUMENTS = (
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
)
"""Keywords about all arguments jointly. A grammar of single parameters cannot express them."""
_KINDS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "enum", "required"), (list, "a list")),
    **dict.fromkeys(("minLength", "maxLength"), (int, "a whole number")),
    **dict.fromkeys(("pattern", "format", "$ref"), (str, "a text")),
    "properties": (dict, "an object"),
    "type": ((str, list), "a type or a list of them"),
}
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment", "deprecated"})
_HEX, _LABEL = "[0-9a-fA-F]", "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_MONTH_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_HOUR = "([01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_HOUR}:[0-5][0-9])"
_FORMATS: Mapping[str, str] = {
    "date": f"[0-9]{{4}}-{_MONTH_DAY}",
    "time": _TIME,
    "date-time": f"[0-9]{{4}}-{_MONTH_DAY}T{_TIME}",
    "duration": "P([0-9]{1,9}[YMWD]|[0-9]{1,9}DT[0-9]{1,9}H|T[0-9]{1,9}[HMS])",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,31}})?@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": f"({_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}|({_HEX}{{1,4}}:){{1,7}}:",
    "uuid": f"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "uri": "[a-zA-Z][a-zA-Z0-9+.-]*:[A-Za-z0-9._~:\x2f?#@!$&'()*+,;=%-]+",
}
"""Texts of the formats that llguidance supports in JSON; some valid texts are excluded."""
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""A token of a regular expression, as needed to find anchors and groups."""


def any_parameters() -> Part:
    """Build a grammar that allows any parameters."""
    return _others((), (_string({}, ""),))


def call_parameters(tool: str, schema: Mapping[str, Any]) -> tuple[Part, ...]:
    """Build the parameters of a call of ``tool`` that match the JSON Schema of its arguments.

    The time grows faster than the size of ``schema``. Call it only in the process that tests
    grammars.

    Raises:
        UserError: this is not a schema, or this grammar cannot express it.
    """
    parameters = Parameters(schema)
    arguments = _checked(parameters.arguments, tool)
    for key in _OF_ARGUMENTS:
        if key in arguments:
            raise _refusal(tool, key)
    required = [name for name in arguments.get("required", ()) if isinstance(name, str)]
    parts: list[Part] = []
    size = 0
    for name in dict.fromkeys([*parameters.names, *required]):
        if parameters.schema(name) is False:
            if name in required:
                raise _refusal(tool, f"{name:.40}: required, and never allowed")
            continue
        if not re.fullmatch(r"[^<>\n]{1,256}", name):
            raise _refusal(tool, f"a parameter named {name:.40}")
        value = _value(parameters.schema(name), parameters.find, tool)
        size += len(json.dumps(part_form(value)))
        if size > _MAX_BYTES:
            raise UserError(
                f"{tool}: expected at most {_MAX_BYTES} bytes of schemas, references included, "
                f"got {size}. Send less."
            )
        parameter = (f"<parameter={name}>\n", *value)
        parts += parameter if name in required else [Repeated(parameter, once=True)]
    others = arguments.get("additionalProperties", not parameters.names)
    if others is not False:
        parts.append(_others(tuple(parameters.names), _value(others, parameters.find, tool)))
    return tuple(parts)


def _checked(schema: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Check the types of the keywords of ``schema`` that this module reads."""
    for key, (kind, what) in _KINDS.items():
        value = schema.get(key)
        if key in schema and (not isinstance(value, kind) or isinstance(value, bool)):
            raise UserError(f"{where}: {key}: expected {what}, got {quote(value, 40)}.")
    return schema


def _others(names: tuple[str, ...], value: tuple[Part, ...]) -> Part:
    """Build any number of parameters with names outside ``names``."""
    excluding = tuple(_literal(name) for name in names)
    return Repeated(("<parameter=", TextPart((_NAME,), excluding, ">\n"), *value))


def _value(schema: Any, find: Find, where: str) -> tuple[Part, ...]:
    """Build the value of a parameter and the tag after it."""
    types = types_of(schema, find)
    if "string" not in types:
        return _json(standalone(schema, find))
    alternatives = _alternatives(schema, find, where)
    free = {
        name
        for alternative in alternatives
        for name in named_types(alternative) & _WRITTEN.keys()
        if not alternative.keys() & _BOUNDS
    }
    misread = tuple(_READS_AS[name] for name in sorted(types & _READS_AS.keys() - free))
    options: list[tuple[Part, ...]] = []
    for alternative in alternatives:
        if alternative.keys() & {"enum", "const"}:
            options.append(_enumerated(alternative, types, where))
            continue
        for name in sorted(named_types(alternative) or {"string"}):
            if name == "string":
                options.append((_string(alternative, where, misread),))
            elif name in free:
                options.append((TextPart((_WRITTEN[name],), end=_CLOSING),))
            else:
                options.append(_json(standalone({**alternative, "type": name}, find)))
    return options[0] if len(options) == 1 else (Either(tuple(options)),)


def _json(schema: Any) -> tuple[Part, ...]:
    return (JsonPart(schema_text(schema)), _CLOSING)


def _enumerated(schema: Mapping[str, Any], types: frozenset[str], where: str) -> tuple[Part, ...]:
    """Build the listed values that the reader parses unchanged."""
    values = [schema["const"]] if "const" in schema else schema["enum"]
    texts = []
    for value in values:
        text = value if isinstance(value, str) else schema_text(value)
        if json.loads(json_from_text(text, types)) == value and "</parameter>" not in text:
            texts.append(_literal(text))
    if not texts:
        raise _refusal(where, "an enum whose values all read as another type")
    return (TextPart(("|".join(texts),), end=_CLOSING),)


def _string(schema: Mapping[str, Any], where: str, misread: tuple[str, ...] = ()) -> Part:
    """Build a string. ``misread``: texts that the reader would parse as another type."""
    for key in ("not", "if"):
        if key in schema:
            raise _refusal(where, key)
    matching = [_ANYTHING]
    if "pattern" in schema:
        matching.append(_found(schema["pattern"], where))
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", "")
    if shortest or longest != "":
        matching.append(rf"(.|\n){{{shortest},{longest}}}")
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise _refusal(where, f"format {quote(schema['format'], 40)}")
        matching.append(_FORMATS[schema["format"]])
    return TextPart(tuple(matching), (_NO_CLOSING, *misread), _CLOSING)


def _alternatives(schema: Any, find: Find, where: str) -> list[dict[str, Any]]:
    """Flatten ``schema`` into schemas without references, one of which a value must match."""
    found: list[dict[str, Any]] = []
    todo: list[tuple[dict[str, Any], Any]] = [({}, schema)]
    for _ in range(_MAX_ALTERNATIVES * 4):
        if not todo:
            return found
        inherited, part = todo.pop()
        part = _checked(part, where) if isinstance(part, Mapping) else {}
        own = {k: v for k, v in part.items() if k not in {"$ref", "anyOf", "oneOf", "allOf"}}
        merged = _merged(inherited, own, where)
        if "$ref" in part:
            todo.append((merged, resolve({"$ref": part["$ref"]}, find)))
            continue
        if len(part.get("allOf", ())) > 1 or ("anyOf" in part and "oneOf" in part):
            raise _refusal(where, "allOf, or anyOf beside oneOf, of a string")
        options = combined(part)
        todo += [(merged, option) for option in reversed(options)]
        found += [] if options else [merged]
    raise _refusal(where, f"more than {_MAX_ALTERNATIVES} alternatives of a string")


def _merged(first: dict[str, Any], second: dict[str, Any], where: str) -> dict[str, Any]:
    """Merge two schemas."""
    for key in first.keys() & second.keys() - _ANNOTATIONS:
        if first[key] != second[key]:
            raise _refusal(where, f"{key} twice")
    return {**first, **second}


def _found(pattern: str, where: str) -> str:
    """Build a regular expression that matches every text containing ``pattern``."""
    branches: list[list[str]] = [[]]
    depth = 0
    for token in _TOKEN.findall(pattern):
        depth += (token == "(") - (token == ")")
        if token == "|" and not depth:
            branches.append([])
        else:
            branches[-1].append(token)
    whole = []
    for branch in branches:
        begins, ends = branch[:1] == ["^"], branch[-1:] == ["$"]
        inner = branch[begins : len(branch) - ends]
        if {"^", "$"} & set(inner):
            raise _refusal(where, f"an anchor inside the pattern {quote(pattern, 40)}")
        before, after = "" if begins else _ANYTHING, "" if ends else _ANYTHING
        whole.append(f"{before}({''.join(inner)}){after}")
    return "|".join(whole)


def _literal(text: str) -> str:
    """Build a regular expression that matches only ``text``."""
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{{{ord(c):x}}}" for c in text)


def _refusal(where: str, what: str) -> UserError:
    return UserError(
        f"{where}: {what}: the grammar of this checkpoint's XML calls cannot enforce it. "
        "Remove it, or leave calls unconstrained (tool_choice auto, without strict)."
    )
