"""Bound one HTTP connection: uvicorn's protocol with a deadline for every state."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from trt_eagle3.serving.config import ServingConfig

__all__ = [
    "SEND_BUFFER",
    "BoundedConnection",
    "connection_class",
    "drop_all",
    "drop_idle",
    "drop_stalled",
]

_log = logging.getLogger("trt_eagle3")
# Bytes queued for a client that does not read. The fewer, the sooner its request makes room for
# others. The kernel doubles its part, and the client's kernel takes what its own receive buffer
# holds.
SEND_BUFFER = 8 << 10
_MAX_STALL_S = 5.0  # without reading, before a client may be disconnected for others
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n"
    b"Retry-After: 1\r\nContent-Length: 0\r\n\r\n"
)


class BoundedConnection(H11Protocol):
    """Close a connection that waits too long for headers, or whose client does not read.

    ``header_timeout_s`` limits the headers, and after an answer the rest of the request's body.
    ``send_timeout_s`` limits how long a client may read nothing. Past ``max_connections``, the
    connection that was idle the longest is closed. If none is idle, the new one is refused with
    503.
    """

    serving: ClassVar[ServingConfig] = ServingConfig()
    raw_transport: asyncio.Transport | None = None  # under TLS, with a buffer of its own
    _deadline: asyncio.TimerHandle | None = None  # for the client to send
    _stalled: asyncio.TimerHandle | None = None  # for the client to read
    _idle_since = 0.0
    _stalled_since = 0.0

    @property
    def idle(self) -> bool:
        """Return whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def num_unsent(self) -> int:
        """Count the bytes of answers that the client's kernel has not taken."""
        under = self.raw_transport.get_write_buffer_size() if self.raw_transport else 0
        return self.transport.get_write_buffer_size() + under

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set small buffers, and start the deadline of the first headers."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=SEND_BUFFER)
        connected: socket.socket = transport.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._wait_for_headers()
        if len(self.connections) > self.serving.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._unset("_deadline")
        self._unset("_stalled")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse ``data``; the header deadline continues until a request is complete."""
        super().data_received(data)
        if not self.idle:
            self._unset("_deadline")
        elif self._deadline is None:
            self._wait_for_headers()

    def on_response_complete(self) -> None:
        """Start the deadline of the next request, or of the rest of this one's body."""
        self._wait_for_headers()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start the send deadline: the client reads more slowly than the server sends."""
        super().pause_writing()
        self._stalled_since = self.loop.time()
        self._cut_off_unless_read()

    def resume_writing(self) -> None:
        """Stop the send deadline: the client has read."""
        self._unset("_stalled")
        super().resume_writing()

    def _cut_off_unless_read(self) -> None:
        self._unset("_stalled")
        self._stalled = self.loop.call_later(
            self.serving.send_timeout_s, self._give_up, "reads nothing for too long"
        )

    def _wait_for_headers(self) -> None:
        self._unset("_deadline")
        self._idle_since = self.loop.time()
        self._deadline = self.loop.call_later(self.serving.header_timeout_s, self._expire)

    def _expire(self) -> None:
        self._unset("_deadline")
        if not self.idle:
            return
        # the client may still be reading the answer
        if self._stalled is None and self.num_unsent:
            self._stalled = self.loop.call_later(
                self.serving.send_timeout_s, self._give_up, "reads nothing for too long"
            )
        elif self._stalled is None:
            self._give_up("sent no whole request in time")

    def _give_up(self, why: str) -> None:
        _log.warning("a client was disconnected: it %s", why)
        self.transport.abort()

    def _make_room(self) -> None:
        idle = [
            other
            for other in self.connections
            if isinstance(other, BoundedConnection) and other.idle
        ]
        oldest = min(
            (other for other in idle if other is not self),
            key=lambda other: other._idle_since,
            default=None,
        )
        _log.warning(
            "more than %d connections (max_connections): closing the longest idle one",
            self.serving.max_connections,
        )
        if oldest is not None:
            oldest.transport.abort()
            # connections of the same loop iteration must not choose it again
            self.connections.discard(oldest)
            return
        self.transport.write(_FULL)
        self.transport.close()

    def _unset(self, name: str) -> None:
        timer: asyncio.TimerHandle | None = getattr(self, name)
        if timer is not None:
            timer.cancel()
        setattr(self, name, None)


def connection_class(limits: ServingConfig) -> type[BoundedConnection]:
    """Return a ``BoundedConnection`` class with these limits, for uvicorn."""

    class Connection(BoundedConnection):
        serving = limits

    return Connection


def drop_stalled(connections: set[Any]) -> None:
    """Disconnect the client that has stalled the longest, if it has stalled long enough."""
    stalled = [
        c for c in connections if isinstance(c, BoundedConnection) and c._stalled is not None
    ]
    oldest = min(stalled, key=lambda c: c._stalled_since, default=None)
    if oldest is not None and oldest.loop.time() - oldest._stalled_since > _MAX_STALL_S:
        oldest._give_up("reads nothing while other requests wait")


def drop_idle(connections: set[Any]) -> None:
    """Close every connection that has no request and nothing left to send."""
    for connection in list(connections):
        if connection.idle and not connection.num_unsent:
            connection.transport.abort()


def drop_all(connections: set[Any]) -> None:
    """Close every connection at once, even with data left to send."""
    for connection in list(connections):
        connection.transport.abort()
