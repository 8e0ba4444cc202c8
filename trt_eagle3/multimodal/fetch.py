"""Read the encoded bytes of an image or video, as a policy permits.

Sources: bytes, a data URI, a path, or an allowed URL.
"""

from __future__ import annotations

import base64
import contextlib
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.parse import SplitResult, urljoin, urlsplit

import numpy as np

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.caller import NO_CALLER, Caller, abandonable
from trt_eagle3.multimodal.policy import MediaPolicy
from trt_eagle3.multimodal.timed_connection import PORTS, Deadline, TimedConnection

__all__ = ["REMOTE", "check_num_frames", "is_frame_list", "read_media", "scheme", "split_frames"]

REMOTE = ("http", "https", "ftp", "s3", "gs")
"""Schemes of remote sources."""
_FRAME_LIST = "data:video/jpeg;base64,"
_BLOCK = 1 << 16
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 10
_STANDARD_ALPHABET = bytes.maketrans(b"-_", b"+/")  # from the URL-safe one
_BLANKS = b" \t\n\r\v\f"
_HEX = np.full(256, 16, dtype=np.uint8)  # value of each hexadecimal digit; 16: not a digit
_HEX[list(b"0123456789abcdefABCDEF")] = [*range(16), *range(10, 16)]


def scheme(source: str) -> str:
    """Return the lower-case scheme, such as ``data``, ``file`` or ``http``; empty for a path."""
    head, colon, _ = source[:20].partition(":")
    return head.lower() if colon and head.isalnum() and head.isascii() else ""


def is_frame_list(source: object) -> bool:
    """Return whether ``source`` is vLLM's frame list ``data:video/jpeg;base64,FRAME,FRAME,...``."""
    return isinstance(source, str) and source[: len(_FRAME_LIST)].lower() == _FRAME_LIST


def split_frames(uri: str, name: str, policy: MediaPolicy) -> list[str]:
    """Split vLLM's frame list into one data URI per frame.

    Raises:
        UserError: there are more than ``policy.max_video_frames``.
    """
    check_num_frames(uri.count(","), name, policy)
    return [f"data:image/jpeg;base64,{frame}" for frame in uri[len(_FRAME_LIST) :].split(",")]


def check_num_frames(count: int, name: str, policy: MediaPolicy) -> None:
    """Check the number of frames against the policy.

    Raises:
        UserError: there are more than ``policy.max_video_frames``.
    """
    limit = policy.max_video_frames
    if limit is not None and count > limit:
        raise UserError(f"{name}: {count} frames, the limit is {limit}. Send fewer.")


def read_media(
    source: str | Path | bytes, name: str, policy: MediaPolicy, caller: Caller = NO_CALLER
) -> bytes:
    """Read the encoded bytes of ``source``, at most ``policy.max_bytes``.

    Raises:
        UserError: the policy does not permit the source or its size, or it cannot be read.
        RequestCancelledError: ``caller`` was cancelled meanwhile.
    """
    if isinstance(source, bytes):
        return _bounded(source, name, policy)
    kind = scheme(source) if isinstance(source, str) else ""
    if kind == "data":
        return _decode_data_uri(str(source), name, policy)
    if kind in REMOTE:
        return _fetch(str(source), name, policy, caller)
    if not policy.paths:
        raise UserError(
            f"{name}: files are not read on behalf of a request. Send the data itself as a data "
            "URI."
        )
    path = Path(source.removeprefix("file://") if isinstance(source, str) else source)
    try:
        return _bounded(path.read_bytes(), name, policy)
    except FileNotFoundError as error:
        raise UserError(f"{name}: no such file. Check the path.") from error
    except OSError as error:
        raise UserError(
            f"{name}: not readable ({error.strerror}). Check the path and its permissions."
        ) from error
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{name}: not readable ({error}). Check the path and its permissions."
        ) from error


def _bounded(data: bytes, name: str, policy: MediaPolicy) -> bytes:
    _check_bytes(len(data), name, policy)
    return data


def _check_bytes(count: int, name: str, policy: MediaPolicy) -> None:
    if policy.max_bytes is not None and count > policy.max_bytes:
        raise UserError(
            f"{name}: {count} bytes, the limit is {policy.max_bytes}. Send a smaller one."
        )


def _decode_data_uri(uri: str, name: str, policy: MediaPolicy) -> bytes:
    """Decode base64 of either alphabet, with or without padding; else percent-encoded bytes."""
    header, comma, payload = uri.partition(",")
    if not comma:
        raise UserError(
            f"{name}: expected data:image/<type>;base64,<data>. Encode the image as base64."
        )
    data = _without_percents(payload.encode("utf-8", "surrogatepass"))
    if not header.lower().endswith(";base64"):
        return _bounded(data, name, policy)
    data = data.translate(_STANDARD_ALPHABET, _BLANKS).rstrip(b"=")
    _check_bytes(len(data) * 3 // 4, name, policy)
    try:
        return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
    except ValueError as error:
        raise UserError(
            f"{name}: the data URI's base64 is broken ({error}). Encode the image again."
        ) from error


def _without_percents(text: bytes) -> bytes:
    """Decode like ``urllib.parse.unquote_to_bytes``, which takes 70 bytes of memory per ``%41``."""
    if b"%" not in text:
        return text
    parts, start = [], 0
    while start < len(text):
        stop = start + _BLOCK
        begun = text.rfind(b"%", stop - 2, stop)  # an escape across the cut
        stop = stop if begun < 0 else begun
        parts.append(_unescaped(text[start:stop]))
        start = stop
    return b"".join(parts)


def _unescaped(text: bytes) -> bytes:
    codes = np.frombuffer(text, dtype=np.uint8)
    high, low = _HEX[codes[1:-1]], _HEX[codes[2:]]
    escapes = np.flatnonzero((codes[:-2] == ord("%")) & (high < 16) & (low < 16))
    decoded, kept = codes.copy(), np.ones(len(codes), dtype=bool)
    decoded[escapes] = 16 * high[escapes] + low[escapes]
    kept[escapes + 1] = kept[escapes + 2] = False
    return decoded[kept].tobytes()


def _fetch(url: str, name: str, policy: MediaPolicy, caller: Caller) -> bytes:
    """GET an http or https URL of an allowed host.

    All redirects and the response share the policy's limits of time and size.
    """
    _check_host(url, name, policy)
    try:
        return abandonable(lambda: _get(url, name, policy), caller, policy.fetch_timeout_s)
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name}: cannot be fetched ({_reason(error)}). Check the URL.") from error


def _get(url: str, name: str, policy: MediaPolicy) -> bytes:
    deadline = Deadline(policy.fetch_timeout_s)
    for _ in range(_MAX_REDIRECTS + 1):
        _check_host(url, name, policy)
        with (
            contextlib.closing(TimedConnection(url, deadline)) as connection,
            connection.get() as answer,
        ):
            if answer.status in _REDIRECTS and (place := answer.headers.get("Location")):
                url = urljoin(url, place)
                continue
            if answer.status != 200:
                raise HTTPException(f"status {answer.status} {answer.reason}")
            return _body(answer, name, policy)
    raise HTTPException(f"more than {_MAX_REDIRECTS} redirects")


def _body(answer: HTTPResponse, name: str, policy: MediaPolicy) -> bytes:
    data = bytearray()
    while block := answer.read1(_BLOCK):
        data += block
        _check_bytes(len(data), name, policy)
    if answer.length:
        raise HTTPException(f"it ended {answer.length} bytes early")
    return bytes(data)


def _reason(error: Exception) -> str:
    """Describe ``error`` without the number of a system error."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(str(text).split()) or type(error).__name__


def _check_host(url: str, name: str, policy: MediaPolicy) -> None:
    try:
        parts = urlsplit(url)
        reason = _objection(parts, policy)
        how = _remedy(parts) if policy.paths else "Send the data itself as a data URI."
    except ValueError as error:
        raise UserError(f"{name}: not a URL ({error}). Check it.") from error
    if reason:
        raise UserError(f"{name}: {reason}. {how}")


def _remedy(parts: SplitResult) -> str:
    """Return the fix to suggest to a user that may choose the hosts."""
    if parts.scheme.lower() not in PORTS or "@" in parts.netloc or not parts.hostname:
        return "Download it and give the path."
    host = f"{parts.netloc.lower():.80}"
    return f"Allow its host (--allow-host {host}), or download it and give the path."


def _objection(parts: SplitResult, policy: MediaPolicy) -> str | None:
    """Return why a URL is not fetched; None if it may be."""
    if not policy.allowed_hosts:
        return "remote images and videos are not fetched here"
    if parts.scheme.lower() not in PORTS:
        return "only http and https URLs are fetched here"
    if "@" in parts.netloc:
        return "URLs with a user's name in them are not fetched here"
    if not any(_matches(pattern, parts) for pattern in policy.allowed_hosts):
        return f"{parts.hostname or ''!r:.80}, port {_port(parts)}, is not in allowed_hosts"
    return None


def _port(parts: SplitResult) -> int:
    return parts.port or PORTS[parts.scheme.lower()]


def _matches(pattern: str, parts: SplitResult) -> bool:
    host, colon, port = pattern.lower().rpartition(":")
    if not colon or not port.isdigit():
        host, port = pattern.lower(), str(PORTS[parts.scheme.lower()])
    if str(_port(parts)) != port:
        return False
    name = (parts.hostname or "").rstrip(".")
    return (
        name.endswith(host[1:]) and name != host[1:]
        if host.startswith("*.")
        else name == host.strip("[]")
    )
