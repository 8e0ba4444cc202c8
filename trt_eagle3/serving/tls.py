"""Serve HTTPS: connections count after their handshake, and have the same bounds."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any

from trt_eagle3.serving.certificate import certificate_warning, read_certificate
from trt_eagle3.serving.config import ServingConfig
from trt_eagle3.serving.connection import SEND_BUFFER, BoundedConnection
from trt_eagle3.serving.http_options import HttpOptions

__all__ = ["encrypted", "tls_context"]

_log = logging.getLogger("trt_eagle3")
_SHUTDOWN_S = 3.0  # for a client to close the TLS session


def tls_context(http: HttpOptions) -> ssl.SSLContext | None:
    """Return the context of the certificate in ``http``; None if it has none.

    Raises:
        UserError: as for ``read_certificate``.
    """
    if http.tls_cert is None or http.tls_key is None:
        return None
    context = read_certificate(http.tls_cert, http.tls_key)
    if (warning := certificate_warning(context, http.tls_cert)) is not None:
        _log.warning(warning)
    return context


class _Handshakes:
    """Bound TLS handshakes: ``max_connections`` at a time, ``header_timeout_s`` each."""

    def __init__(self, serving: ServingConfig) -> None:
        self._most = serving.max_connections
        self._waiting: dict[_Handshake, None] = {}

    def add(self, handshake: _Handshake) -> None:
        """Add one; past the limit, close the oldest."""
        self._waiting[handshake] = None
        if len(self._waiting) > self._most:
            oldest = next(iter(self._waiting))
            _log.warning("more than %d TLS handshakes: closing the oldest", self._most)
            self.remove(oldest)
            oldest.abort()

    def remove(self, handshake: _Handshake) -> None:
        """Remove a handshake that has succeeded or failed."""
        self._waiting.pop(handshake, None)


class _Handshake(asyncio.Protocol):
    """A connection during its TLS handshake; ``make`` then makes its HTTP protocol."""

    def __init__(
        self,
        make: Callable[[], BoundedConnection],
        context: ssl.SSLContext,
        serving: ServingConfig,
        handshakes: _Handshakes,
    ) -> None:
        self._make = make
        self._context = context
        self._timeout_s = serving.header_timeout_s
        self._handshakes = handshakes
        self._raw: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._early: list[bytes] = []  # arrived with the end of the handshake
        self._lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=SEND_BUFFER)
        self._raw = transport
        self._handshakes.add(self)
        self._task = asyncio.get_running_loop().create_task(self._encrypt(transport))

    def data_received(self, data: bytes) -> None:
        """Keep data that arrived before the HTTP protocol took over."""
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Record that the connection ended during the handshake."""
        del exc
        self._lost = True

    def abort(self) -> None:
        """Close the connection."""
        if self._raw is not None:
            self._raw.abort()

    async def _encrypt(self, raw: asyncio.Transport) -> None:
        try:
            transport = await asyncio.get_running_loop().start_tls(
                raw,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._timeout_s,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        except OSError:  # not TLS, an unsupported version, too slow, or disconnected
            return
        finally:
            self._handshakes.remove(self)
        if transport is None or self._lost:
            return
        connection = self._make()
        connection.raw_transport = raw
        transport.set_protocol(connection)
        connection.connection_made(transport)
        for data in self._early:
            connection.data_received(data)


def encrypted(
    connection: Callable[..., BoundedConnection], context: ssl.SSLContext, serving: ServingConfig
) -> Callable[..., asyncio.Protocol]:
    """Return a factory of ``connection``s behind TLS, for uvicorn.

    A connection begins once its handshake is done; before that, no request can hold resources.
    """
    handshakes = _Handshakes(serving)

    def make(**options: Any) -> asyncio.Protocol:
        return _Handshake(lambda: connection(**options), context, serving, handshakes)

    return make
