"""Give each request an id, and log one line per request."""

from __future__ import annotations

import logging
import time
import uuid
from typing import TYPE_CHECKING

from trt_eagle3.errors import clip

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["RequestLog"]

_log = logging.getLogger("trt_eagle3.access")

_HEADER = b"x-request-id"
_MAX_ID_LEN = 128
_UNLISTED_STATUSES = frozenset({0, 408, 499})  # none, request timeout, client disconnected
_PROBES = frozenset({"/health", "/metrics"})  # polled by machines every few seconds
_INTERVAL_S = 10.0
_MAX_LINES = 1000  # per interval, so that no client fills the disk


class RequestLog:
    """ASGI middleware: echoes or generates ``X-Request-Id``, and logs each request when it ends."""

    def __init__(self, app: ASGIApp, *, enabled: bool = True) -> None:
        self._app = app
        self._enabled = enabled
        self._since = 0.0
        self._num_lines = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        begin, status, num_bytes = time.monotonic(), 0, 0

        async def send_with_id(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (_HEADER, request_id.encode())]
            num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            listed = scope["path"] not in _PROBES and status not in _UNLISTED_STATUSES
            if self._enabled and listed:
                self._write(scope, request_id, status, time.monotonic() - begin, num_bytes)

    def _write(
        self, scope: Scope, request_id: str, status: int, seconds: float, num_bytes: int
    ) -> None:
        if not self._may_write():
            return
        client = scope.get("client")
        _log.info(
            "%s %s %s %d %.3fs %dB id=%s",
            _field(client[0] if client else "-", 45),
            _field(scope["method"], 16),
            _field(scope["path"], 80),
            status,
            seconds,
            num_bytes,
            _field(request_id, _MAX_ID_LEN),
        )

    def _may_write(self) -> bool:
        now = time.monotonic()
        if now - self._since > _INTERVAL_S:
            left_out = self._num_lines - _MAX_LINES
            if left_out > 0:
                _log.info("%d more requests are not logged", left_out)
            self._since, self._num_lines = now, 0
        self._num_lines += 1
        return self._num_lines <= _MAX_LINES


def _field(text: str, most: int) -> str:
    """Make a client's text one word of a log line: printable, bounded, without spaces."""
    return clip(text, most).replace(" ", "%20")


def _request_id(scope: Scope) -> str:
    """Return the client's request id if it is short and printable, else a new one."""
    for name, value in scope.get("headers", ()):
        if name == _HEADER:
            text: str = value.decode("latin-1")
            if 0 < len(text) <= _MAX_ID_LEN and text.isascii() and text.isprintable():
                return text
    return f"req_{uuid.uuid4().hex}"
