"""Define the messages between a server and its engine process, and their channel."""

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
    """Submit ``request``; ``number`` identifies its answer in later messages."""

    number: int
    request: Request


@dataclass(frozen=True)
class Cancel:
    """Cancel the answer: it is no longer needed."""

    number: int


@dataclass(frozen=True)
class Lag:
    """Report whether the reader of an answer is far behind."""

    number: int
    lags: bool


@dataclass(frozen=True)
class CountRejected:
    """Count a request that the server itself refused."""


@dataclass(frozen=True)
class GetMetrics:
    """Request ``Metrics``."""


@dataclass(frozen=True)
class Close:
    """Cancel all answers, and exit."""


@dataclass(frozen=True)
class Opened:
    """Report an opened bundle; ``limits`` are reduced to what fits on the GPU."""

    limits: LimitsConfig


@dataclass(frozen=True)
class Ready:
    """Report that the engine accepts requests. ``seconds``: time of the warm-up."""

    seconds: float


@dataclass(frozen=True)
class Failed:
    """Report that the engine cannot be opened."""

    error: Exception


@dataclass(frozen=True)
class Metrics:
    """The counters at the time of the request."""

    metrics: EngineMetrics


Fields = tuple[tuple[int, ...], str, Any, tuple[TokenLogprob, ...], tuple[int, ...]]
"""The fields of a ``Chunk``; a tuple pickles faster."""


@dataclass(frozen=True)
class News:
    """New chunks and ends of answers.

    Attributes:
        chunks: (answer number, fields of a chunk), in order.
        ends: (answer number, error to raise instead, what was generated) of finished answers.
    """

    chunks: Sequence[tuple[int, Fields]]
    ends: Sequence[tuple[int, Exception | None, Generation]]


_log = logging.getLogger("trt_eagle3")


def _pickled(message: Any) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def _each(items: list[Any]) -> Iterator[Any]:
    """Yield every item as one message, and drop it from ``items``: a request may be large."""
    while items:
        yield items.pop(0)


class Channel:
    """One end of a socket connection. Its own thread writes, so that ``send`` never blocks."""

    def __init__(
        self,
        connection: Connection,
        messages_of: Callable[[list[Any]], Iterable[Any]] = _each,
    ) -> None:
        """Start the writer; ``messages_of`` turns all queued items into messages."""
        self._connection = connection
        self._messages_of = messages_of
        self._items = SimpleQueue[Any]()
        self._writer = threading.Thread(target=self._write, name="trt-eagle3-channel", daemon=True)
        self._writer.start()

    def send(self, item: Any) -> None:
        """Queue an item, and return at once."""
        self._items.put(item)

    def receive(self) -> Any:
        """Return the next message; None after the last one.

        None follows when either end has closed, or has sent a message that cannot be read.
        """
        try:
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None
        except Exception:
            _log.exception("a message cannot be read")
            return None

    def end(self) -> None:
        """Write all queued items, then close both directions. Returns at once."""
        self._items.put(None)

    def close(self) -> None:
        """Call ``end``, wait until everything is written, and close this end."""
        self.end()
        self._writer.join()
        self._connection.close()

    def _write(self) -> None:
        """Write queued items until ``end``; on any error close the connection for both readers."""
        try:
            while self._write_waiting():
                pass
        except Exception:
            _log.exception("a message cannot be sent")
        finally:
            self._shut_down()

    def _write_waiting(self) -> bool:
        """Wait for items, and write all that are queued; return False after ``end``."""
        items = [self._items.get()]
        while not self._items.empty():
            items.append(self._items.get())
        goes_on = None not in items
        items = [item for item in items if item is not None]
        for data in map(_pickled, self._messages_of(items)):
            with contextlib.suppress(OSError):  # the other end is gone; ``receive`` reports it
                self._connection.send_bytes(data)
        return goes_on

    def _shut_down(self) -> None:
        """Wake the readers at both ends, after they have read what was sent."""
        with (
            socket.socket(fileno=os.dup(self._connection.fileno())) as shared,
            contextlib.suppress(OSError),  # the other end has closed it
        ):
            shared.shutdown(socket.SHUT_RDWR)
