"""An answer in the making, as its reader sees it.

The core writes, the reader reads, in any thread or event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from trt_eagle3.decode.request.output import Output
from trt_eagle3.decode.request.request import Chunk, FinishReason, Generation

__all__ = ["Answer", "Sink", "wake_readers"]

_log = logging.getLogger("trt_eagle3")
_MAX_UNREAD = 32  # chunks; a reader further behind than this makes its sequence wait


Sink = Callable[[Sequence["Answer"]], object]
"""Is told which answers have chunks or an end, and takes them later (``Answer.take``): the decoding
thread calls it, so it returns at once."""


@dataclass(frozen=True, eq=False)
class _LoopReader:
    """A reader in an event loop, which waits for ``news``."""

    loop: asyncio.AbstractEventLoop
    news: asyncio.Event


class Answer:
    """Iterate over it, plainly or with ``async for``, for ``Chunk``s; its ``generation`` says what
    there is so far.

    Leaving the iteration early, or letting go of the answer, cancels the request.
    """

    def __init__(self, wake: Callable[[], None], keeps: object = None) -> None:
        """``wake``: tells the core that there is something to look at.

        ``keeps``: what must live as long as this.
        """
        self.cancelled = False
        self.failure: Exception | None = None  # of its sink: nothing more can be handed on
        self.prompt_tokens = self.reused_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.output: Output | None = None
        self._wake = wake
        self._keeps = keeps
        self._start = self._last_time = time.perf_counter()
        self._first_time: float | None = None
        self._accepted_lengths: list[int] = []
        self._chunks: deque[Chunk] = deque()
        self._error: Exception | None = None
        self._over = False
        self._num_awaiting = 0
        self._behind = False
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # of threads that read
        self._ended = threading.Condition(lock)  # of those that wait for the end
        self._loop_readers: list[_LoopReader] = []
        self._sink: Sink | None = None
        self._reader_lags = False

    @property
    def seconds(self) -> float:
        """Since the request came."""
        return time.perf_counter() - self._start

    @property
    def lagging(self) -> bool:
        """Whether the reader is so far behind that there is no hurry, and has not caught up since.

        One who waits for the end is not.
        """
        unread = len(self._chunks)
        self._behind = unread >= _MAX_UNREAD or (self._behind and unread > _MAX_UNREAD // 2)
        return (self._behind or self._reader_lags) and not self._num_awaiting

    @property
    def error(self) -> Exception | None:
        """What its reader is told in place of an end."""
        return self._error

    @property
    def over(self) -> bool:
        """Whether nothing will be added, and nothing is held for it any more."""
        return self._over

    def put(self, chunk: Chunk) -> float:
        """Add a chunk (the core's side, which wakes readers later: ``wake_readers``); returns the
        seconds since the one before.
        """
        now = time.perf_counter()
        seconds = now - self._last_time
        self.finish_reason = chunk.finish_reason
        if chunk.token_ids:
            if self._first_time is None:
                self._first_time = now
            self._last_time = now
        self._accepted_lengths += chunk.accepted_lengths
        self._chunks.append(chunk)
        return seconds

    def end(self, error: Exception | None = None) -> None:
        """Nothing more will come (the core's side, as ``put``)."""
        with self._changed:
            self._error, self._over = error, True

    def send_to(self, sink: Sink) -> None:
        """Let ``sink`` take the chunks, for a reader elsewhere (``set_lag``)."""
        self._sink = sink
        sink([self])

    def set_lag(self, lags: bool) -> None:
        """Whether a reader elsewhere is far behind (``send_to``)."""
        self._reader_lags = lags
        if not lags:
            self._wake()

    def take(self) -> tuple[list[Chunk], bool]:
        """The chunks that are there, and whether there will be no others (``send_to``)."""
        over = self._over  # read first: once it is over, they are all there
        return [self._chunks.popleft() for _ in range(len(self._chunks))], over

    def _wake_threads(self) -> None:
        with self._changed:
            self._changed.notify_all()
            if self._over:
                self._ended.notify_all()

    def cancel(self) -> None:
        """Ask for no more; its pages are given back before the engine's next step."""
        self.cancelled = True
        self._wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is over, without reading; returns whether it is."""
        with self._ended:
            self._num_awaiting += 1
            try:
                return self._ended.wait_for(lambda: self._over, timeout)
            finally:
                self._num_awaiting -= 1

    def read_at_end(self) -> None:
        """Say that its reader comes when it is over: until then nobody lags."""
        with self._changed:
            self._num_awaiting += 1

    def __iter__(self) -> Iterator[Chunk]:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._chunks or self._over)
                    chunk = self._next()
                if chunk is None:
                    return
                yield chunk
        finally:
            if not self._over:
                # and no wait: this may be the thread that decodes, collecting garbage
                self.cancel()

    async def __aiter__(self) -> AsyncGenerator[Chunk]:
        reader = _LoopReader(asyncio.get_running_loop(), asyncio.Event())
        self._loop_readers.append(reader)
        try:
            while True:
                reader.news.clear()
                over = self._over  # read before the chunks: once it is over, they are all there
                while (chunk := self._next()) is not None:
                    yield chunk
                if over:
                    return
                await reader.news.wait()
        finally:
            self._loop_readers.remove(reader)
            if not self._over:
                self.cancel()

    def _next(self) -> Chunk | None:
        """The next chunk; None at the end."""
        with self._changed:
            if self._chunks:
                lagged = self.lagging
                chunk = self._chunks.popleft()
                if lagged and not self.lagging:
                    self._wake()
                return chunk
            if self._over and self._error is not None:
                raise self._error
            return None

    def with_waiting(self, chunk: Chunk) -> Chunk:
        """``chunk``, which was read, with those that wait behind it: a reader who comes late has as
        little to do as one who is in time. What ends the answer without a text stays apart.
        """
        found = [chunk]
        while self._chunks and self._chunks[0].finish_reason != "cancelled":
            following = self._next()
            assert following is not None, "its reader is the only one"
            found.append(following)
        return chunk if len(found) == 1 else Chunk.joined(found)

    def finish(self) -> Generation:
        """Read to the end, and wake for nothing before it."""
        try:
            self.wait()
        finally:
            if not self._over:
                self.cancel()
        for _ in self:
            pass
        return self.generation

    @property
    def generation(self) -> Generation:
        """What has been generated so far."""
        output, lengths = self.output, self._accepted_lengths
        tokens = tuple(output.token_ids) if output else ()
        first = self._first_time
        seconds = self._last_time - first if first else 0.0
        return Generation(
            text=output.text if output else "",
            token_ids=tokens,
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused_tokens,
            finish_reason=self.finish_reason,
            acceptance_length=sum(lengths) / len(lengths) if lengths else None,
            accepted_lengths=tuple(lengths),
            tokens_per_second=(len(tokens) - 1) / seconds
            if len(tokens) > 1 and seconds > 0
            else None,
            time_to_first_token_ms=None if first is None else 1000 * (first - self._start),
            logprobs=tuple(output.logprobs) if output else (),
        )


def wake_readers(answers: Iterable[Answer]) -> None:
    """Wake who reads ``answers``, which have chunks or an end that nobody was told of: a thread
    where it is the reader, and an event loop or a sink once, however many are read there. Answers
    whose sink fails have a ``failure``.

    Waking a loop writes to a socket, after which Python may switch to the reader: a core that woke
    one reader after another would wait for each of them.
    """
    loops: dict[asyncio.AbstractEventLoop, list[tuple[Answer, asyncio.Event]]] = {}
    sinks: dict[Sink, list[Answer]] = {}
    for answer in answers:
        if answer._sink is not None:
            if answer._over:
                answer._wake_threads()  # that wait for the end
            sinks.setdefault(answer._sink, []).append(answer)
            continue
        answer._wake_threads()
        for reader in tuple(answer._loop_readers):
            loops.setdefault(reader.loop, []).append((answer, reader.news))
    for sink, answers_of_sink in sinks.items():
        try:
            sink(answers_of_sink)
        except Exception as error:  # the core ends these answers; others have their news
            _log.exception("a sink of answers failed")
            for answer in answers_of_sink:
                answer.failure = error
    for loop, found in loops.items():
        try:
            loop.call_soon_threadsafe(_set_all, [news for _, news in found])
        except RuntimeError:  # the loop was closed under its readers, who have left then
            for answer, _ in found:
                answer.cancelled = True


def _set_all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()
