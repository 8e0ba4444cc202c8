"""Messages between a server and the process of its engine."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from trt_eagle3.config import LimitsConfig
from trt_eagle3.decode.metrics import EngineMetrics
from trt_eagle3.decode.request.request import Generation, Request
from trt_eagle3.decode.sampling.logprobs import TokenLogprob

__all__ = [
    "Cancel",
    "Channel",
    "Close",
    "CountRejected",
    "Failed",
    "GetMetrics",
    "Lag",
    "Metrics",
    "News",
    "Opened",
    "Ready",
    "Submit",
]


@dataclass(frozen=True)
class Submit:
    """Answer ``request``, which is called ``number`` from here on."""

    number: int
    request: Request


@dataclass(frozen=True)
class Cancel:
    """Nobody wants the answer any more."""

    number: int


@dataclass(frozen=True)
class Lag:
    """Whether the reader of an answer is far behind."""

    number: int
    lags: bool


@dataclass(frozen=True)
class CountRejected:
    """The server has refused a request itself."""


@dataclass(frozen=True)
class GetMetrics:
    """``Metrics`` are wanted."""


@dataclass(frozen=True)
class Close:
    """Cancel everything, and end."""


@dataclass(frozen=True)
class Opened:
    """The bundle was read; ``limits``: as far as the GPU holds them."""

    limits: LimitsConfig


@dataclass(frozen=True)
class Ready:
    """Requests will be answered. ``seconds``: of the warm-up."""

    seconds: float


@dataclass(frozen=True)
class Failed:
    """The engine cannot be opened."""

    error: Exception


@dataclass(frozen=True)
class Metrics:
    """The counters when they were asked for."""

    metrics: EngineMetrics


Fields = tuple[tuple[int, ...], str, Any, tuple[TokenLogprob, ...], tuple[int, ...]]
"""Of a ``Chunk``, which takes longer to pickle."""


@dataclass(frozen=True)
class News:
    """What answers have got.

    Attributes:
        chunks: by number of the answer, in order.
        ends: of answers that are over: what their readers are told instead, and what was generated.
    """

    chunks: Sequence[tuple[int, Fields]]
    ends: Sequence[tuple[int, Exception | None, Generation]]


_log = logging.getLogger("trt_eagle3")


def _pickled(message: Any) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def _each(items: list[Any]) -> Iterator[Any]:
    """Every item as a message, which nobody holds once it is taken: a request may be large."""
    while items:
        yield items.pop(0)


class Channel:
    """One end of a connection over a socket. Messages are written on a thread: whoever sends one
    waits for nobody.
    """

    def __init__(
        self,
        connection: Connection,
        messages_of: Callable[[list[Any]], Iterable[Any]] = _each,
    ) -> None:
        """``messages_of``: what is sent of items that wait together."""
        self._connection = connection
        self._messages_of = messages_of
        self._items = SimpleQueue[Any]()
        self._writer = threading.Thread(target=self._write, name="trt-eagle3-channel", daemon=True)
        self._writer.start()

    def send(self, item: Any) -> None:
        """Send an item, soon."""
        self._items.put(item)

    def receive(self) -> Any:
        """The next message; None where there will be no other: one of the ends has ended, or sent
        what nobody can read.
        """
        try:
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None
        except Exception:
            _log.exception("a message cannot be read")
            return None

    def end(self) -> None:
        """Write what waits, and let neither end receive more; back at once."""
        self._items.put(None)

    def close(self) -> None:
        """``end``, wait for that, and close this end."""
        self.end()
        self._writer.join()
        self._connection.close()

    def _write(self) -> None:
        """Send what comes until ``end``; whatever else ends it, both readers hear of it."""
        try:
            while self._write_waiting():
                pass
        except Exception:
            _log.exception("a message cannot be sent")
        finally:
            self._shut_down()

    def _write_waiting(self) -> bool:
        """Wait for items, and send all that are there; returns whether others may follow."""
        items = [self._items.get()]
        while not self._items.empty():
            items.append(self._items.get())
        goes_on = None not in items
        items = [item for item in items if item is not None]
        for data in map(_pickled, self._messages_of(items)):
            with contextlib.suppress(OSError):  # the other end is gone: its reader knows
                self._connection.send_bytes(data)
        return goes_on

    def _shut_down(self) -> None:
        """Wake whoever receives, here and at the other end, once it has read what was sent."""
        with (
            socket.socket(fileno=os.dup(self._connection.fileno())) as shared,
            contextlib.suppress(OSError),  # the other end has closed it
        ):
            shared.shutdown(socket.SHUT_RDWR)
