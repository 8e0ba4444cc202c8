"""Describe pydantic's validation errors in this package's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["problem_text"]

_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "frozen_set_type": "a list",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "{ge} or more",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "a number below {lt}",
    "less_than_equal": "{le} or less",
    "list_type": "a list",
    "literal_error": "one of {expected}",
    "mapping_type": "a mapping",
    "model_attributes_type": "a mapping",
    "model_type": "a mapping",
    "path_type": "a path",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "string_type": "a text",
    "too_long": "at most {max_length} of them",
    "too_short": "at least {min_length} of them",
    "tuple_type": "a list",
}


def problem_text(error: Mapping[str, Any]) -> str:
    """Describe the expected value of an entry of ``ValidationError.errors()``.

    The caller adds its place and the value that was got.
    """
    expected = _EXPECTED.get(error["type"])
    if expected is None:
        return str(error["msg"]).removeprefix("Value error, ")
    return f"expected {expected.format(**error.get('ctx', {}))}"
