"""Bodies of HTTP requests: read in time, within one budget of bytes, and counted while they
come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from types import TracebackType
from typing import Any

from trt_eagle3.errors import OverloadedError
from trt_eagle3.serving.config import ServingConfig
from trt_eagle3.serving.json_fields import largest_field
from trt_eagle3.serving.json_reader import JsonScanner, TooLargeError

__all__ = ["BodyBudget", "BodyEvictedError", "BodyLease", "BodyTimeoutError"]

_MIN_RATE = 64 << 10  # bytes per second: a slower body is the first to go when the budget is spent
_PATIENCE_S = 2.0  # without a block, or before a body's rate is looked at
_STOPPING = "the server is stopping. Ask another one."
_SLOW = "it comes slower than others that need its memory. Send it again."


class BodyTimeoutError(TimeoutError):
    """A body that did not come in time."""


class BodyEvictedError(OverloadedError):
    """A body that had to give way while it came."""


class BodyBudget:
    """The bytes that all bodies may take together, from their first block until their prompts
    are prepared.
    """

    def __init__(self, serving: ServingConfig, pool: Executor) -> None:
        """``pool``: threads that count what a body holds."""
        self.serving = serving
        self.pool = pool
        self.num_bytes = 0
        self.stopping = False
        self._reading: set[BodyLease] = set()

    def lease(self) -> BodyLease:
        """A share of the budget for one request; use it as a context manager."""
        return BodyLease(self)

    def stop(self) -> None:
        """End every body that is still being read: the server is going down."""
        self.stopping = True
        for lease in list(self._reading):
            lease.evict(_STOPPING)

    def begin(self, lease: BodyLease) -> None:
        """Count ``lease`` among those that read."""
        if self.stopping:
            raise OverloadedError(_STOPPING)
        self._reading.add(lease)

    def end(self, lease: BodyLease) -> None:
        """``lease`` reads no more."""
        self._reading.discard(lease)

    def take(self, lease: BodyLease, count: int) -> None:
        """Make room for ``count`` more bytes of ``lease``; bodies that come too slowly give way.

        Raises:
            OverloadedError: there is no room.
        """
        limit = self.serving.max_bodies_bytes
        slow = [other for other in self._reading if other.slow and other is not lease]
        for other in sorted(slow, key=lambda other: other.last_block):
            if self.num_bytes + count > limit:
                other.evict(_SLOW)
        if self.num_bytes + count > limit:
            raise OverloadedError(
                f"bodies of all requests take {limit} bytes (max_bodies_bytes). Try again later."
            )
        self.num_bytes += count
        lease.num_bytes += count

    def give_back(self, lease: BodyLease) -> None:
        """Free what ``lease`` holds."""
        self.num_bytes -= lease.num_bytes
        lease.num_bytes = 0


class BodyLease:
    """One body's share of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self.num_bytes = 0
        self._budget = budget
        self._began = self.last_block = time.monotonic()
        self._timeout: asyncio.Timeout | None = None
        self._evicted: str | None = None

    def __enter__(self) -> BodyLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the share back; whatever was read is not held any more."""
        self._budget.give_back(self)

    @property
    def slow(self) -> bool:
        """Whether it stands still, or comes slower than anybody's network."""
        now = time.monotonic()
        waited, seconds = now - self.last_block, now - self._began
        return waited > _PATIENCE_S or (
            seconds > _PATIENCE_S and self.num_bytes < _MIN_RATE * seconds
        )

    def evict(self, why: str) -> None:
        """End the reading of this body with ``why``; its bytes count no more."""
        self._evicted = why
        self._budget.end(self)
        self.close()
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def read(self, blocks: AsyncIterator[bytes]) -> tuple[bytearray, JsonScanner]:
        """Read a body; returns it with what its scanner saw.

        Raises:
            BodyTimeoutError: it stood still, or came too slowly.
            OverloadedError: no room for it, or it was evicted.
            TooLargeError: over a limit of ``ServingConfig``.
        """
        data, scanner = bytearray(), JsonScanner(self._budget.serving)
        self._budget.begin(self)
        try:
            async with asyncio.timeout(None) as self._timeout:
                self._extend()
                async for block in blocks:
                    await self._add(block, data, scanner)
                    self._extend()
        except TimeoutError as error:
            if self._evicted is not None:
                raise BodyEvictedError(f"body: {self._evicted}") from error
            seconds = self._budget.serving.body_timeout_s
            raise BodyTimeoutError(
                f"body: nothing came for {seconds:g} s, or too little. Send it faster."
            ) from error
        finally:
            self._timeout = None
            self._budget.end(self)
        return data, scanner

    async def _add(self, block: bytes, data: bytearray, scanner: JsonScanner) -> None:
        if not block:
            return
        if len(data) + len(block) > self._budget.serving.max_body_bytes:
            limit = self._budget.serving.max_body_bytes
            raise TooLargeError(
                f"body: more than {limit} bytes (max_body_bytes). Send fewer or smaller images.",
                "max_body_bytes",
            )
        self._budget.take(self, len(block))
        data += block
        try:
            await self._on_thread(scanner.feed, block)
        except TooLargeError as error:
            by_text = error.limit == "max_text_bytes"
            raise error.about(await self._on_thread(largest_field, data, by_text)) from None

    async def _on_thread(self, run: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._budget.pool, run, *args)

    def _extend(self) -> None:
        """The next block may take ``body_timeout_s``; all of them together that long, plus their
        size at 64 KiB/s.
        """
        if self._timeout is None or self._evicted is not None:
            return
        patience, now = self._budget.serving.body_timeout_s, time.monotonic()
        self.last_block = now
        last = min(now + patience, self._began + patience + self.num_bytes / _MIN_RATE)
        self._timeout.reschedule(asyncio.get_running_loop().time() + last - now)
