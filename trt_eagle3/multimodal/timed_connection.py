"""TimedConnection: an HTTP GET with one deadline for connection, headers and body."""

from __future__ import annotations

import io
import socket
import ssl
import time
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

__all__ = ["PORTS", "Deadline", "TimedConnection"]

PORTS = {"http": 80, "https": 443}


class Deadline:
    """A point in time, ``seconds`` from now."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds until the deadline.

        Raises:
            TimeoutError: the deadline has passed.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"not complete after {self._seconds:g} s")
        return left


class TimedConnection(HTTPConnection):
    """A connection for one GET of ``url``. It ignores the environment's proxies."""

    def __init__(self, url: str, deadline: Deadline) -> None:
        """Prepare the connection, without connecting."""
        parts = urlsplit(url)
        scheme = parts.scheme.lower()
        super().__init__(parts.hostname or "", parts.port or PORTS[scheme])
        self.default_port = PORTS[scheme]  # omitted from the Host header
        self._tls = scheme == "https"
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._deadline = deadline
        self.response_class = _timed_response(deadline)

    def get(self) -> HTTPResponse:
        """Send the request and read the headers. Close the response before the connection.

        Raises:
            OSError, HTTPException, ValueError: no response. TimeoutError: the deadline has passed.
        """
        self.request(
            "GET", self._target, headers={"User-Agent": "trt-eagle3", "Connection": "close"}
        )
        return self.getresponse()

    def connect(self) -> None:
        """Connect to the host's addresses in order until one succeeds."""
        self.sock = _connected(self.host, self.port, self._deadline)
        if self._tls:
            context = ssl.create_default_context()
            context.set_alpn_protocols(["http/1.1"])
            self.sock = context.wrap_socket(self.sock, server_hostname=self.host)


def _timed_response(deadline: Deadline) -> type[HTTPResponse]:
    class TimedResponse(HTTPResponse):
        """A response whose reads time out at the deadline."""

        def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
            super().__init__(sock, *args, **options)
            # the original reader keeps the socket open; the connection drops it after the headers
            self.fp = io.BufferedReader(_TimedReader(self.fp.detach(), sock, deadline))

    return TimedResponse


class _TimedReader(io.RawIOBase):
    """A socket reader whose reads time out at the deadline."""

    def __init__(self, received: io.RawIOBase, sock: socket.socket, deadline: Deadline) -> None:
        self._received, self._sock, self._deadline = received, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._deadline.left())
        try:
            return self._received.readinto(buffer)
        except TimeoutError:
            self._deadline.left()  # raises a clearer message
            raise

    def close(self) -> None:
        self._received.close()
        super().close()


def _connected(host: str, port: int, deadline: Deadline) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure: OSError = OSError(f"no address of {host}")
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(deadline.left())
            sock.connect(address)
            sock.settimeout(deadline.left())  # for a whole TLS handshake
            return sock
        except OSError as error:
            sock.close()
            failure = error
    raise failure
