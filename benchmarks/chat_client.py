"""A client of OpenAI-compatible servers that records when each piece of an answer arrives.

Written for load: one connection per request; parses an answer only after its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from trt_eagle3.errors import EnvironmentMissingError, UserError, clip

__all__ = ["ClientReply", "ChatServer"]

_LINE_BYTES = 1 << 22  # most bytes of an event


@dataclass(frozen=True)
class ClientReply:
    """A streamed answer, timed at its client.

    Attributes:
        first_seconds: from sending the request to the first piece with text.
        gaps: seconds between pieces with text.
        num_tokens: of the answer, by the server's count.
        error: the server's error in place of an answer; None for an answer.
    """

    text: str
    first_seconds: float
    gaps: tuple[float, ...]
    num_tokens: int
    error: str | None = None


@dataclass(frozen=True)
class ChatServer:
    """Address of ``/v1/chat/completions``. ``model``: the server's name of its model."""

    host: str
    port: int
    tls: bool
    path: str
    model: str = ""
    api_key: str | None = None

    @classmethod
    async def find(cls, url: str, api_key: str | None = None) -> ChatServer:
        """Return the server at ``url`` (``http://host:port``, with or without ``/v1``).

        Raises:
            UserError: the URL is invalid.
            EnvironmentMissingError: no server answers there.
        """
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise UserError(f"{clip(url)}: expected a URL such as http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        found = cls(parts.hostname, parts.port or (443 if tls else 80), tls, path, api_key=api_key)
        try:
            _, body = await found._get("/v1/models")
            model = json.loads(body)["data"][0]["id"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise EnvironmentMissingError(
                f"{clip(url)}: no OpenAI-compatible server answers there ({clip(error)}). Start it"
            ) from error
        return cls(found.host, found.port, tls, path, model, api_key)

    async def ask(self, body: Mapping[str, Any]) -> ClientReply:
        """Stream the answer to ``body``, whose model and stream options are set here."""
        asked = {**body, "model": self.model, "stream": True}
        asked["stream_options"] = {"include_usage": True}
        data = json.dumps(asked).encode()
        start = time.perf_counter()
        lines: list[tuple[float, bytes]] = []
        try:
            async with self._request("POST", "/v1/chat/completions", data) as (status, content):
                async for line in content:
                    lines.append((time.perf_counter(), line))
        except (OSError, ValueError, LookupError, EOFError) as error:
            return _failed(f"{type(error).__name__}: {error}")
        if status != 200:
            return _failed(f"status {status}: {b''.join(line for _, line in lines)[:200]!r}")
        return _reply(start, lines)

    async def _get(self, path: str) -> tuple[int, bytes]:
        async with self._request("GET", path, b"") as (status, content):
            return status, b"".join([line async for line in content])

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, data: bytes
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Send a request; yield its status and the lines of the answer."""
        reader, writer = await asyncio.open_connection(
            self.host, self.port, ssl=self.tls or None, limit=_LINE_BYTES
        )
        try:
            writer.write(self._head(method, path, len(data)) + data)
            await writer.drain()
            status, chunked = await _read_head(reader)
            yield status, _lines(_chunks(reader) if chunked else _pieces(reader))
        finally:
            writer.close()

    def _head(self, method: str, path: str, length: int) -> bytes:
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        return (
            f"{method} {self.path}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
            "Connection: close\r\n\r\n"
        ).encode()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Return the status, and whether the body is chunked."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    return int(head.split()[1]), "transfer-encoding: chunked" in head


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(1 << 16):
        yield piece


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest


def _failed(message: str) -> ClientReply:
    return ClientReply("", 0.0, (), 0, clip(message, 300))


def _reply(start: float, lines: list[tuple[float, bytes]]) -> ClientReply:
    """Parse the events of an answer."""
    texts, times, tokens = list[str](), [start], 0
    for when, line in lines:
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            return _failed(json.dumps(event["error"]))
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        text = "".join(c.get("delta", {}).get("content") or "" for c in event.get("choices", ()))
        if text:
            texts.append(text)
            times.append(when)
    if len(times) < 2 or not tokens:
        return _failed(f"an answer without {'text' if tokens else 'usage.completion_tokens'}")
    gaps = tuple(after - before for before, after in pairwise(times[1:]))
    return ClientReply("".join(texts), times[1] - start, gaps, tokens)
