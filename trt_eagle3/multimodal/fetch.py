"""The encoded bytes of an image or video: from bytes, a data URI, a path or an allowed URL, as a
policy permits.
"""

from __future__ import annotations

import base64
import binascii
import time
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import SplitResult, urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    Request,
)

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.caller import NOBODY, Caller, abandonable
from trt_eagle3.multimodal.policy import MediaPolicy

__all__ = ["read_media", "scheme"]

_REMOTE = ("http", "https", "ftp", "s3", "gs")
_PORTS = {"http": 80, "https": 443}
_BLOCK = 1 << 16


def scheme(source: str) -> str:
    """``data``, ``file``, ``http`` and so on, lower case; empty for a path."""
    head, colon, _ = source[:20].partition(":")
    return head.lower() if colon and head.isalnum() and head.isascii() else ""


def read_media(
    source: str | Path | bytes, name: str, policy: MediaPolicy, caller: Caller = NOBODY
) -> bytes:
    """Encoded bytes of ``source``, at most ``policy.max_bytes`` of them.

    Raises:
        UserError: the policy does not permit the source or its size, or it cannot be read.
        RequestCancelledError: ``caller`` left while they were fetched.
    """
    if isinstance(source, bytes):
        return _bounded(source, name, policy)
    kind = scheme(source) if isinstance(source, str) else ""
    if kind == "data":
        return _decode_data_uri(str(source), name, policy)
    if kind in _REMOTE:
        return abandonable(lambda: _fetch(str(source), name, policy), caller)
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
    header, comma, payload = uri.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise UserError(
            f"{name}: expected data:image/<type>;base64,<data>. Encode the image as base64."
        )
    _check_bytes(len(payload) * 3 // 4 - 2, name, policy)
    try:
        return _bounded(base64.b64decode("".join(payload.split()), validate=True), name, policy)
    except (binascii.Error, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{name}: the data URI's base64 is broken ({error}). Encode the image again."
        ) from error


def _fetch(url: str, name: str, policy: MediaPolicy) -> bytes:
    """GET from an allowed host; only http and https, the whole answer within the policy's time
    and size.
    """
    _check_host(url, name, policy)
    opener = OpenerDirector()
    redirects = _Redirects(name, policy)
    for handler in (
        HTTPHandler(),
        HTTPSHandler(),
        redirects,
        HTTPErrorProcessor(),
        HTTPDefaultErrorHandler(),
    ):
        opener.add_handler(handler)
    deadline = time.monotonic() + policy.fetch_timeout_s
    data = bytearray()
    try:
        with opener.open(
            Request(url, headers={"User-Agent": "trt-eagle3"}), timeout=policy.fetch_timeout_s
        ) as answer:
            while block := answer.read1(_BLOCK):
                data += block
                _check_bytes(len(data), name, policy)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not complete after {policy.fetch_timeout_s:g} s")
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name}: cannot be fetched ({_reason(error)}). Check the URL.") from error
    return bytes(data)


def _reason(error: Exception) -> str:
    """In words: of an error that the system numbers its text alone."""
    cause = error
    if isinstance(error, URLError) and isinstance(error.reason, Exception):
        cause = error.reason
    text = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return " ".join(str(text).split()) or type(cause).__name__


class _Redirects(HTTPRedirectHandler):
    """Follows a redirect to an allowed host only."""

    def __init__(self, name: str, policy: MediaPolicy) -> None:
        self._name = name
        self._policy = policy

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        _check_host(newurl, self._name, self._policy)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


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
    """For whoever may choose the hosts."""
    if parts.scheme.lower() not in _PORTS or "@" in parts.netloc or not parts.hostname:
        return "Download it and give the path."
    host = f"{parts.netloc.lower():.80}"
    return f"Allow its host (--allow-host {host}), or download it and give the path."


def _objection(parts: SplitResult, policy: MediaPolicy) -> str | None:
    """Why an URL is not fetched, if it is not."""
    if not policy.allowed_hosts:
        return "remote images and videos are not fetched from here"
    if parts.scheme.lower() not in _PORTS:
        return "of URLs, only http and https are fetched here"
    if "@" in parts.netloc:
        return "URLs with a user's name in them are not fetched here"
    if not any(_matches(pattern, parts) for pattern in policy.allowed_hosts):
        return f"{parts.hostname or ''!r:.80}, port {_port(parts)}, is not in allowed_hosts"
    return None


def _port(parts: SplitResult) -> int:
    return parts.port or _PORTS[parts.scheme.lower()]


def _matches(pattern: str, parts: SplitResult) -> bool:
    host, colon, port = pattern.lower().rpartition(":")
    if not colon or not port.isdigit():
        host, port = pattern.lower(), str(_PORTS[parts.scheme.lower()])
    if str(_port(parts)) != port:
        return False
    name = (parts.hostname or "").rstrip(".")
    return (
        name.endswith(host[1:]) and name != host[1:]
        if host.startswith("*.")
        else name == host.strip("[]")
    )
