"""Answer: a stream of chunks from the core to the reader of a request.

The core writes. The reader reads, in any thread or event loop.
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
from trt_eagle3.decode.sampling.prompt_logprobs import PromptLogprobs

__all__ = ["Answer", "Sink", "wake_readers"]

_log = logging.getLogger("trt_eagle3")
_MAX_UNREAD = 32  # chunks; with this many unread, a sequence is backpressured


Sink = Callable[[Sequence["Answer"]], object]
"""Called with the answers that have new chunks or an end. It must return at once, because the
decoding thread calls it. It reads the chunks later (``Answer.take``)."""


@dataclass(frozen=True, eq=False)
class _LoopReader:
    """A reader in an event loop that waits for ``news``."""

    loop: asyncio.AbstractEventLoop
    news: asyncio.Event


class Answer:
    """A stream of ``Chunk``s; iterate over it with ``for`` or ``async for``.

    ``generation`` is the result so far. Leaving the iteration before the end, or dropping the last
    reference to the answer, cancels the request.
    """

    def __init__(self, wake: Callable[[], None], keeps: object = None) -> None:
        """Create an empty answer.

        ``wake``: wakes the core after a change, such as a cancellation. ``keeps``: an object that
        must live as long as the answer.
        """
        self.cancelled = False
        self.failure: Exception | None = None  # of its sink; no more chunks can be sent
        self.prompt_tokens = self.reused_tokens = 0
        self.prompt_logprobs: PromptLogprobs | None = None
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
        self._changed = threading.Condition(lock)  # for reading threads
        self._ended = threading.Condition(lock)  # for threads that wait for the end
        self._loop_readers: list[_LoopReader] = []
        self._sink: Sink | None = None
        self._reader_lags = False

    @property
    def seconds(self) -> float:
        """Seconds since the request was submitted."""
        return time.perf_counter() - self._start

    @property
    def lagging(self) -> bool:
        """Whether the reader lags far behind.

        It starts at ``_MAX_UNREAD`` unread chunks, and ends at half of them. A reader that waits
        for the end does not lag.
        """
        unread = len(self._chunks)
        self._behind = unread >= _MAX_UNREAD or (self._behind and unread > _MAX_UNREAD // 2)
        return (self._behind or self._reader_lags) and not self._num_awaiting

    @property
    def error(self) -> Exception | None:
        """The error that the reader gets in place of an end; None without an error."""
        return self._error

    @property
    def over(self) -> bool:
        """Whether the answer is complete, and its memory in the engine is released."""
        return self._over

    def put(self, chunk: Chunk) -> float:
        """Add a chunk; returns the seconds since the previous one.

        Only the core calls this. It wakes readers later (``wake_readers``).
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
        """Mark the answer as complete. Only the core calls this, as ``put``."""
        with self._changed:
            self._error, self._over = error, True

    def send_to(self, sink: Sink) -> None:
        """Send the chunks to ``sink``, for a remote reader (``set_lag``)."""
        self._sink = sink
        sink([self])

    def set_lag(self, lags: bool) -> None:
        """Set whether a remote reader lags far behind (``send_to``)."""
        self._reader_lags = lags
        if not lags:
            self._wake()

    def take(self) -> tuple[list[Chunk], bool]:
        """Take all available chunks; returns them, and whether they are the last (``send_to``)."""
        over = self._over  # read first: after the end no chunk is added
        return [self._chunks.popleft() for _ in range(len(self._chunks))], over

    def _wake_threads(self) -> None:
        with self._changed:
            self._changed.notify_all()
            if self._over:
                self._ended.notify_all()

    def cancel(self) -> None:
        """Cancel the request; its pages are released before the engine's next step."""
        self.cancelled = True
        self._wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end without reading; returns whether it was reached."""
        with self._ended:
            self._num_awaiting += 1
            try:
                return self._ended.wait_for(lambda: self._over, timeout)
            finally:
                self._num_awaiting -= 1

    def read_at_end(self) -> None:
        """Declare that the reader reads only at the end, so it never lags."""
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
                # without a wait: garbage collection may run this on the decoding thread
                self.cancel()

    async def __aiter__(self) -> AsyncGenerator[Chunk]:
        reader = _LoopReader(asyncio.get_running_loop(), asyncio.Event())
        self._loop_readers.append(reader)
        try:
            while True:
                reader.news.clear()
                over = self._over  # read before the chunks: after the end no chunk is added
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
        """Take the next chunk; None if there is none."""
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
        """Join ``chunk``, which was read, with the chunks that are queued after it.

        So a late reader has no more work than a timely one. The chunk of a cancellation is not
        joined.
        """
        found = [chunk]
        while self._chunks and self._chunks[0].finish_reason != "cancelled":
            following = self._next()
            assert following is not None, "its reader is the only one"
            found.append(following)
        return chunk if len(found) == 1 else Chunk.joined(found)

    def finish(self) -> Generation:
        """Wait for the end, then read all chunks; returns the result."""
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
        """The result so far."""
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
            prompt_logprobs=self.prompt_logprobs,
        )


def wake_readers(answers: Iterable[Answer]) -> None:
    """Wake the readers of ``answers``, which have new chunks or an end.

    Each event loop and each sink is woken once for all its answers. If a sink fails, its answers
    get a ``failure``.

    Waking a loop writes to a socket, after which Python may switch to the reader. If the core woke
    readers one by one, it could wait for each of them.
    """
    loops: dict[asyncio.AbstractEventLoop, list[tuple[Answer, asyncio.Event]]] = {}
    sinks: dict[Sink, list[Answer]] = {}
    for answer in answers:
        if answer._sink is not None:
            if answer._over:
                answer._wake_threads()  # threads may wait for the end
            sinks.setdefault(answer._sink, []).append(answer)
            continue
        answer._wake_threads()
        for reader in tuple(answer._loop_readers):
            loops.setdefault(reader.loop, []).append((answer, reader.news))
    for sink, answers_of_sink in sinks.items():
        try:
            sink(answers_of_sink)
        except Exception as error:  # the core ends these answers; other answers are not affected
            _log.exception("a sink of answers failed")
            for answer in answers_of_sink:
                answer.failure = error
    for loop, found in loops.items():
        try:
            loop.call_soon_threadsafe(_set_all, [news for _, news in found])
        except RuntimeError:  # the loop is closed, so its readers have left
            for answer, _ in found:
                answer.cancelled = True


def _set_all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()
