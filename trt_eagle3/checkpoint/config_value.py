"""Read values of an untrusted config.json by dotted key and kind, or raise a one-line error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from trt_eagle3.errors import UserError, quote

__all__ = ["MAX_WHOLE", "Kind", "config_value"]

MAX_WHOLE = 2**31
"""Exclusive upper bound of sizes, counts and ids: graphs and tensors store them as int32."""

Kind = Literal["whole", "number", "flag", "text", "wholes", "integers", "texts", "object", "any"]


def config_value(config: Mapping[str, Any], key: str, kind: Kind, file: Path) -> Any:
    """Return the value at a dotted key; None if it is absent or null.

    Raises:
        UserError: the value is not of ``kind``. The message names ``file`` and the key.
    """
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    words, fits = _KINDS[kind]
    if value is not None and not fits(value):
        raise UserError(f"{file}: {key}: expected {words}, got {quote(value)}")
    return value


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_WHOLE


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < MAX_WHOLE


def _number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < 1e30
        and math.isfinite(value)
    )


_KINDS: Mapping[Kind, tuple[str, Callable[[Any], bool]]] = {
    "whole": (f"a whole number from 0 to {MAX_WHOLE - 1}", _whole),
    "number": ("a number", _number),
    "flag": ("true or false", lambda v: isinstance(v, bool)),
    "text": ("a text", lambda v: isinstance(v, str)),
    "wholes": (
        f"a list of whole numbers from 0 to {MAX_WHOLE - 1}",
        lambda v: isinstance(v, list) and all(_whole(x) for x in v),
    ),
    "integers": (
        "a list of whole numbers",
        lambda v: isinstance(v, list) and all(_integer(x) for x in v),
    ),
    "texts": (
        "a list of texts",
        lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v),
    ),
    "any": ("anything", lambda _: True),
    "object": ("an object", lambda v: isinstance(v, dict)),
}
