"""Map errors of requests to HTTP statuses and OpenAI error objects."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from trt_eagle3.errors import (
    MAX_MESSAGE_LEN,
    OverloadedError,
    TrtEagle3Error,
    UserError,
    clip,
)
from trt_eagle3.serving.body import BodyTimeoutError
from trt_eagle3.serving.field_error import FieldError
from trt_eagle3.serving.json_reader import TooLargeError

__all__ = [
    "FieldError",
    "RefusedError",
    "describe",
    "error_object",
    "nearest",
    "status_of",
    "with_param",
]

_log = logging.getLogger("trt_eagle3")
_STATUSES: Mapping[type[Exception], int] = {  # subclasses before their base classes
    TooLargeError: 413,
    UserError: 400,
    BodyTimeoutError: 408,
    OverloadedError: 503,
    TimeoutError: 504,
}
_CODES: Mapping[int, str] = {
    408: "request_timeout",
    413: "request_too_large",
    503: "overloaded",
    504: "timeout",
}
# prefixes of messages about media
_MEDIA = ("image ", "image: ", "video ", "video: ")
# a field and the path inside it: tools[0].function.parameters.properties.my city.type
_LEADING_NAME = re.compile(r"(([A-Za-z_]+)(?:\.[^.:\[\]]{1,64}|\[[\w-]*\])*): ")
_LEADING_FIELD = re.compile(r"(([A-Za-z_]+))[.\[]")  # for paths with unusual names


class RefusedError(TrtEagle3Error):
    """A refusal with an HTTP status and an OpenAI error code."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def nearest(name: str, known: Collection[str]) -> str:
    """Suggest known names similar to ``name`` in a sentence, or give the number of known names."""
    close = get_close_matches(name[:40].lower(), known, 3)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return f"None of the {len(known)} known names is similar: see docs/serving.md."


def with_param(error: UserError, fields: Collection[str], aliases: Mapping[str, str]) -> UserError:
    """Attach to ``error`` the request field at the beginning of its message, if there is one.

    Args:
        fields: the fields of the request. aliases: from the engine's name to the request's field.
    """
    if isinstance(error, FieldError | TooLargeError):
        return error
    found = _LEADING_NAME.match(str(error)) or _LEADING_FIELD.match(str(error))
    if "prompt" in aliases and str(error).startswith(_MEDIA):
        return FieldError(str(error), aliases["prompt"])
    if found is None:
        return error
    whole, name = found[1], found[2]
    if name in aliases:
        too_long = name == "prompt" and "the limit is" in str(error) and "tokens" in str(error)
        code = "context_length_exceeded" if too_long else "invalid_value"
        return FieldError(str(error), aliases[name], code)
    return FieldError(str(error), whole) if name in fields else error


def status_of(error: Exception) -> int:
    """Return the HTTP status of a failure that is not Starlette's own."""
    if isinstance(error, RefusedError):
        return error.status
    if isinstance(error, TooLargeError) and error.param is not None:
        return 400  # one field is wrong, the body is not too large
    return next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 500)


def error_object(error: Exception) -> dict[str, Any]:
    """Build OpenAI's error object; of a foreign error, it has the class name only."""
    status = status_of(error)
    message = str(error)
    if status == 500:
        _log.error("a request failed: %s: %s", type(error).__name__, clip(error))
        message = f"internal error: {type(error).__name__}"
    code = error.code if isinstance(error, RefusedError | FieldError) else _CODES.get(status)
    if isinstance(error, TooLargeError):
        code = _CODES[413]
    param = error.param if isinstance(error, RefusedError | FieldError | TooLargeError) else None
    return describe(message, status, param, code)


def describe(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Build OpenAI's error object from these values."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {
        "error": {
            "message": clip(message, MAX_MESSAGE_LEN),
            "type": kind,
            "param": param,
            "code": code,
        }
    }
