"""Check a request's Host header and body framing before routing."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse

from trt_eagle3.errors import quote
from trt_eagle3.serving.errors import RefusedError, error_object

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["RequestGuard", "checked_hosts", "is_loopback"]

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def checked_hosts(host: str, names: Iterable[str], *, has_key: bool) -> frozenset[str] | None:
    """Return the allowed values of the Host header; None: any.

    The owner of a domain can point it at 127.0.0.1 (DNS rebinding). Pages of that domain then reach
    a server on loopback through the user's browser, but their requests name the domain.

    Args:
        host: the address that the server listens on.
        names: further allowed hosts, ``*`` for any.
        has_key: whether requests need a key, which such a page does not have.
    """
    given = {name.lower() for name in names}
    if "*" in given or not (given or (is_loopback(host) and not has_key)):
        return None
    return frozenset({*_LOOPBACK_NAMES, host.lower(), *given})


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class RequestGuard:
    """ASGI middleware that refuses requests for other hosts.

    It also closes the connection after a request with both Content-Length and Transfer-Encoding, as
    RFC 9112 requires.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None) -> None:
        """``hosts``: from ``checked_hosts``."""
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        ambiguous = {b"content-length", b"transfer-encoding"} <= headers.keys()

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
            await send(message)

        app, host = self._app, headers.get(b"host")
        if self._hosts is not None and host is not None:
            name = _name_of(host.decode("latin-1"))
            app = app if name in self._hosts else _refusal(name)
        await app(scope, receive, send_and_close if ambiguous else send)


def _name_of(header: str) -> str:
    """Return the host of a header like ``LocalHost.:8000``: lower case, no port, no last dot."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower().removesuffix(".")


def _refusal(name: str) -> ASGIApp:
    message = f"Host: {quote(name, 80)} is not served here. Allow it: serve --allow-host-header"
    return JSONResponse(error_object(RefusedError(421, message, "host_not_allowed")), 421)
