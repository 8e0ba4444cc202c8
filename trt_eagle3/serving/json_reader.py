"""Count and bound untrusted JSON before any object is built from it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trt_eagle3.errors import UserError, clip
from trt_eagle3.io.json_file import parse_json
from trt_eagle3.serving.config import ServingConfig
from trt_eagle3.serving.field_error import FieldError

__all__ = ["JsonScanner", "TooLargeError", "parse_request_json"]

_STRING_BODY = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_MEDIA_HEAD = b"data:"
_BLOCK = 1 << 16  # bytes per call: other threads run between calls
# Bytes: longer data URIs are cut out before parsing. The parser blocks all threads while it runs.
_LONG = 4096


class TooLargeError(UserError):
    """A body that exceeds a limit on bytes or on values.

    Attributes:
        limit: the field of ``ServingConfig``. param: the request's largest field, if one caused it.
    """

    def __init__(self, message: str, limit: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.limit = limit
        self.param = param

    def about(self, param: str | None) -> TooLargeError:
        """Return the same error with the request's largest field."""
        if param is None:
            return self
        return TooLargeError(f"{self} Most is in {param}.", self.limit, param)


class JsonScanner:
    """Count bytes and values of JSON text, block by block, before it is parsed.

    Bytes inside a string that begins with ``data:`` are media; all other bytes are text. A value is
    a string (including field names), a list, an object, or anything separated by a comma. The count
    is never below the number of objects that the parser would make.
    """

    def __init__(self, serving: ServingConfig, name: str = "body") -> None:
        self._serving = serving
        self._name = name
        self._in_string = self._after_backslash = False
        self._head = b""  # first bytes of the open string, enough to detect ``data:``
        self._num_text = self._num_bytes = self._num_values = 0
        self._opened, self._has_escapes = 0, False  # of the open string: offset of its first byte
        self.media: list[tuple[int, int]] = []
        """Start and end offsets of long data URIs without escapes, excluding the quotes."""

    def feed(self, block: bytes) -> None:
        """Count a block.

        Raises:
            TooLargeError: more bytes or values than the limits allow.
        """
        start, end, limit = 0, len(block), self._serving.max_json_values
        while start < end and self._num_values <= limit:
            start = (
                self._string(block, start, end)
                if self._in_string
                else self._structure(block, start, end)
            )
        self._num_bytes += end
        self._check()

    def _structure(self, block: bytes, start: int, end: int) -> int:
        """Count up to the next string; return the offset of its first byte."""
        quote = block.find(b'"', start)
        stop = end if quote < 0 else quote + 1
        self._num_text += stop - start
        if stop - start > (quote >= 0):
            self._num_values += sum(block.count(mark, start, stop) for mark in (b",", b"[", b"{"))
        if quote >= 0:
            self._num_values += 1
            self._in_string, self._head = True, b""
            self._opened, self._has_escapes = self._num_bytes + stop, False
        return stop

    def _string(self, block: bytes, start: int, end: int) -> int:
        """Count the open string's bytes in this block; return the offset of their end."""
        stop = self._end_of_string(block, start, end)
        if len(self._head) < len(_MEDIA_HEAD):
            self._head += block[start : min(stop, start + len(_MEDIA_HEAD) - len(self._head))]
        if self._head != _MEDIA_HEAD:
            self._num_text += stop - start
        elif not self._in_string and not self._has_escapes:
            closed = self._num_bytes + stop - 1
            if closed - self._opened >= _LONG:
                self.media.append((self._opened, closed))
        return stop

    def _end_of_string(self, block: bytes, start: int, end: int) -> int:
        """Return the offset after the quote that closes the open string, or the block's end."""
        quote = block.find(b'"', start)
        if not self._after_backslash and block.find(b"\\", start, end if quote < 0 else quote) < 0:
            self._in_string = quote < 0
            return end if quote < 0 else quote + 1
        self._has_escapes = True
        found = _STRING_BODY.match(block, start + self._after_backslash)
        stop = found.end() if found else end
        self._in_string = stop >= end or block[stop : stop + 1] == b"\\"
        # a backslash is the block's last byte: the escaped byte comes in the next one
        self._after_backslash = stop < end and self._in_string
        return min(stop + 1, end)

    def _check(self) -> None:
        limits = (
            (self._num_bytes, "max_body_bytes", "bytes. Send fewer or smaller images."),
            (
                self._num_text,
                "max_text_bytes",
                "bytes of text (data URIs are counted separately). Shorten it.",
            ),
            (self._num_values, "max_json_values", "values. Send fewer."),
        )
        for count, field, unit in limits:
            limit = getattr(self._serving, field)
            if count > limit:
                raise TooLargeError(
                    f"{self._name}: more than {limit} {unit} The limit is {field}.", field
                )


def parse_request_json(
    data: bytes | bytearray, name: str, serving: ServingConfig, scanner: JsonScanner | None = None
) -> Any:
    """Parse JSON, and check that all of its texts can be encoded.

    Args:
        scanner: must have scanned all of ``data``; None: ``data`` is scanned here.
    Raises:
        TooLargeError: over a limit of ``serving``.
        UserError: not JSON, not UTF-8, nested too deep, a text with a lone surrogate, or a number
            that is not finite.
    """
    if scanner is None:
        scanner = JsonScanner(serving, name)
        for start in range(0, len(data), _BLOCK):
            scanner.feed(bytes(data[start : start + _BLOCK]))
    try:
        text = _without(data, scanner.media).decode("utf-8-sig")
        value = [parse_json(text, name, fix="Flatten it.")]
        if scanner.media:
            # each URI is copied once, and other threads run in between
            with memoryview(data) as view:
                _put_back(value, [str(view[start:stop], "ascii") for start, stop in scanner.media])
    except UnicodeError as error:
        raise UserError(f"{name}: not JSON: {error!s:.80}. Encode it as UTF-8.") from error
    _check_values(value[0], name)
    return value[0]


def _without(data: bytes | bytearray, media: Sequence[tuple[int, int]]) -> bytes | bytearray:
    """Return ``data`` with ``data:0``, ``data:1``, ... in place of its long data URIs."""
    if not media:
        return data
    parts, end = [], 0
    for i, (start, stop) in enumerate(media):
        parts += [data[end:start], b"data:%d" % i]
        end = stop
    return b"".join([*parts, data[end:]])


def _put_back(value: list[Any], media: Sequence[str]) -> None:
    """Undo ``_without`` in the parsed value, in place."""
    names = {f"data:{i}": uri for i, uri in enumerate(media)}
    left: list[Any] = [value]
    while left:
        holder = left.pop()
        for key, item in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if isinstance(item, str):
                holder[key] = names.get(item, item)
            elif isinstance(item, dict | list):
                left.append(item)


def _check_values(value: Any, name: str) -> None:
    """Refuse a value that JSON cannot represent.

    Raises:
        UserError: a lone surrogate in a text or in a field name.
        FieldError: a number that is not finite: ``NaN``, or ``1e999``, which Python reads as inf.
    """
    left = [value]
    while left:
        match left.pop():
            case str() as text:
                _check_text(text, name)
            case float() as number if not math.isfinite(number):
                raise _not_finite(value, name)
            case Mapping() as fields:
                left += fields.keys()
                left += fields.values()
            case list() | tuple() as values:
                left += values


def _not_finite(value: Any, name: str) -> FieldError:
    """Build the error for the first number of ``value`` that is not finite, with its path."""
    left: list[tuple[str, Any]] = [("" if name == "body" else name, value)]
    while left:
        path, holder = left.pop()
        if isinstance(holder, float) and not math.isfinite(holder):
            break
        if isinstance(holder, Mapping):
            dot = "." if path else ""
            inside = [(f"{path}{dot}{clip(key, 40)}", part) for key, part in holder.items()]
        else:
            parts = holder if isinstance(holder, list) else ()
            inside = [(f"{path}[{i}]", part) for i, part in enumerate(parts)]
        left += reversed(inside)
    path = path or name
    return FieldError(f"{path}: expected a finite number, got {holder}.", path)


def _check_text(text: str, name: str) -> None:
    if text.isascii():  # O(1): a flag of the string
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name}: not Unicode text at character {error.start} of {text!a:.80}."
        ) from error
