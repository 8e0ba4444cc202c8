"""An answer in the making, as its reader sees it.

The core writes, the reader reads, in any thread or event loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator

from trt_eagle3.decode.output import Output
from trt_eagle3.decode.request import Chunk, FinishReason, Generation

__all__ = ["Answer"]

_MAX_UNREAD = 32  # chunks; a reader further behind than this makes its sequence wait


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
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []  # of readers in event loops

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
        return self._behind and not self._num_awaiting

    @property
    def over(self) -> bool:
        """Whether nothing will be added, and nothing is held for it any more."""
        return self._over

    def put(self, chunk: Chunk) -> float:
        """Add a chunk (the core's side); returns the seconds since the one before."""
        now = time.perf_counter()
        seconds = now - self._last_time
        self.finish_reason = chunk.finish_reason
        if chunk.token_ids:
            if self._first_time is None:
                self._first_time = now
            else:
                self._accepted_lengths.append(len(chunk.token_ids))
            self._last_time = now
        with self._changed:
            self._chunks.append(chunk)
            self._tell()
        return seconds

    def end(self, error: Exception | None = None) -> None:
        """Nothing more will come (the core's side)."""
        with self._changed:
            self._error, self._over = error, True
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        for tell in tuple(self._listeners):
            tell()

    def cancel(self) -> None:
        """Ask for no more; its pages are given back before the engine's next step."""
        self.cancelled = True
        self._wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is over, without reading; returns whether it is."""
        with self._changed:
            self._num_awaiting += 1
            try:
                return self._changed.wait_for(lambda: self._over, timeout)
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
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            try:
                loop.call_soon_threadsafe(news.set)
            except RuntimeError:  # the loop was closed under its reader, who has left then
                self.cancelled = True

        self._listeners.append(tell)
        try:
            while True:
                news.clear()
                over = self._over  # read before the chunks: once it is over, they are all there
                while (chunk := self._next()) is not None:
                    yield chunk
                if over:
                    return
                await news.wait()
        finally:
            self._listeners.remove(tell)
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

    def finish(self) -> Generation:
        """Read to the end."""
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
