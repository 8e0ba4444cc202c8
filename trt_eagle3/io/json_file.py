"""Read untrusted JSON with bounds on size, values and depth, and without duplicate keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trt_eagle3.errors import UserError, clip, quote
from trt_eagle3.io.bounded_read import read_bounded

__all__ = ["MAX_JSON_BYTES", "MAX_JSON_DEPTH", "MAX_JSON_VALUES", "parse_json", "read_json_object"]

MAX_JSON_BYTES = 16 << 20
"""A tokenizer_config.json with thousands of added tokens has 1 to 2 MB, a shard index of the
largest models 10 MB.
"""
MAX_JSON_VALUES = 1_000_000
"""Maximum number of values in a text, which take about 100 MB as objects.

It counts commas and opening brackets, including those inside strings.
"""
MAX_JSON_DEPTH = 64

_FIX = "Is it the right file?"


def parse_json(data: bytes | str, name: object, fix: str = _FIX) -> Any:
    """Parse a JSON text.

    Args:
        data: the text; bytes must be UTF-8.
        name: name of the text in errors.
        fix: advice for a text that is too large or nested too deep.
    Raises:
        UserError: this is not UTF-8 or not JSON, has more than ``MAX_JSON_VALUES`` values,
            is nested deeper than ``MAX_JSON_DEPTH``, or repeats a key in one object.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 at byte {error.start}. Save it as UTF-8.") from error
    if sum(map(text.count, ",[{")) > MAX_JSON_VALUES:
        raise UserError(f"{name}: more than {MAX_JSON_VALUES} values of JSON. {fix}")
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise _too_deep(name, fix) from error
    except ValueError as error:
        raise UserError(f"{name}: not JSON: {clip(error)}") from error
    if not _is_shallow(value):
        raise _too_deep(name, fix)
    return value


def read_json_object(file: Path, most_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        UserError: as for ``parse_json``; or the file is not regular, is too long, or is not an
            object.
        OSError: the file is missing or unreadable.
    """
    value = parse_json(read_bounded(file, most_bytes), file)
    if not isinstance(value, dict):
        raise UserError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {quote(key, 80)} appears twice")
            seen.add(key)
    return entries


def _is_shallow(value: Any) -> bool:
    """Return whether ``value`` is nested at most ``MAX_JSON_DEPTH`` deep, without recursion."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return True
    return False


def _children(value: Any) -> Iterator[Any]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (part for part in parts if isinstance(part, dict | list))


def _too_deep(name: object, fix: str) -> UserError:
    return UserError(f"{name}: nested deeper than {MAX_JSON_DEPTH} levels. {fix}")
