"""Read a tool call that is one JSON object with a name and arguments.

Two spellings of the arguments' key are read: ``arguments`` and ``parameters``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container
from typing import Any

from trt_eagle3.multimodal.tool_formats.format import CallPiece

__all__ = ["MAX_HEAD_LEN", "match_head", "read_call"]

MAX_HEAD_LEN = 512
"""Characters before the arguments. A call with a longer head is read once complete."""
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
_NO_ARGUMENTS = frozenset({"name", "type", "id"})
"""Keys of a call without arguments. Any other key might hold the arguments."""


def match_head(text: str) -> tuple[str, int] | None:
    """Return a call's name and the index of its arguments; None if ``text`` has no such head."""
    head = _HEAD.match(text[:MAX_HEAD_LEN])
    name = _json(head[1]) if head else None
    return (name, head.end()) if head and isinstance(name, str) else None


def read_call(text: str, known: Container[str]) -> CallPiece | None:
    """Read a complete call, whatever the order of its keys.

    Returns:
        None if it is no call of a ``known`` name.
    """
    call = _json(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    if call["name"] not in known:
        return None
    if call.keys() <= _NO_ARGUMENTS:
        return CallPiece(call["name"], "{}")
    arguments = call.get("arguments", call.get("parameters"))
    if not isinstance(arguments, dict):
        return None
    return CallPiece(call["name"], json.dumps(arguments, ensure_ascii=False))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
