"""Read HTTP request bodies in time, within one byte budget, and count them as they arrive."""

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

_MIN_RATE = 64 << 10  # bytes per second: slower bodies are evicted first when the budget is spent
_PATIENCE_S = 2.0  # grace time without a block, and before a body's rate is checked
_STOPPING = "the server is stopping. Retry on another server."
_SLOW = "evicted: too slow while other requests need its memory. Send it again."


class BodyTimeoutError(TimeoutError):
    """A body that did not arrive in time."""


class BodyEvictedError(OverloadedError):
    """A body that was evicted while it arrived."""


class BodyBudget:
    """Limit the bytes of all bodies, from their first block until their prompts are prepared."""

    def __init__(self, serving: ServingConfig, pool: Executor) -> None:
        """Create an empty budget; threads of ``pool`` count the contents of bodies."""
        self.serving = serving
        self.pool = pool
        self.num_bytes = 0
        self.stopping = False
        self._reading: set[BodyLease] = set()

    def lease(self) -> BodyLease:
        """Return one request's share of the budget, a context manager."""
        return BodyLease(self)

    def stop(self) -> None:
        """Evict every body that is still being read: the server is shutting down."""
        self.stopping = True
        for lease in list(self._reading):
            lease.evict(_STOPPING)

    def begin(self, lease: BodyLease) -> None:
        """Register ``lease`` as being read.

        Raises:
            OverloadedError: the server is stopping.
        """
        if self.stopping:
            raise OverloadedError(_STOPPING)
        self._reading.add(lease)

    def end(self, lease: BodyLease) -> None:
        """Remove ``lease`` from those being read."""
        self._reading.discard(lease)

    def take(self, lease: BodyLease, count: int) -> None:
        """Reserve ``count`` more bytes for ``lease``; evict bodies that arrive too slowly.

        Raises:
            OverloadedError: too few bytes are free.
        """
        limit = self.serving.max_bodies_bytes
        slow = [other for other in self._reading if other.slow and other is not lease]
        for other in sorted(slow, key=lambda other: other.last_block):
            if self.num_bytes + count > limit:
                other.evict(_SLOW)
        if self.num_bytes + count > limit:
            raise OverloadedError(
                f"bodies of all requests: more than {limit} bytes (max_bodies_bytes). Retry later."
            )
        self.num_bytes += count
        lease.num_bytes += count

    def give_back(self, lease: BodyLease) -> None:
        """Free the bytes of ``lease``."""
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
        """Return the share; the bytes read are no longer counted."""
        self._budget.give_back(self)

    @property
    def slow(self) -> bool:
        """Return whether the body has stalled, or arrives more slowly than any real network."""
        now = time.monotonic()
        waited, seconds = now - self.last_block, now - self._began
        return waited > _PATIENCE_S or (
            seconds > _PATIENCE_S and self.num_bytes < _MIN_RATE * seconds
        )

    def evict(self, why: str) -> None:
        """Stop reading this body with the reason ``why``, and free its bytes."""
        self._evicted = why
        self._budget.end(self)
        self.close()
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def read(self, blocks: AsyncIterator[bytes]) -> tuple[bytearray, JsonScanner]:
        """Read a body; return it with its scanner.

        Raises:
            BodyTimeoutError: it stalled, or arrived too slowly.
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
                f"body: nothing arrived for {seconds:g} s, or too little. Send it faster."
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
        """Move the deadline: ``body_timeout_s`` for the next block, and a limit for the whole body.

        The limit is ``body_timeout_s`` plus the body's size at 64 KiB/s.
        """
        if self._timeout is None or self._evicted is not None:
            return
        patience, now = self._budget.serving.body_timeout_s, time.monotonic()
        self.last_block = now
        last = min(now + patience, self._began + patience + self.num_bytes / _MIN_RATE)
        self._timeout.reschedule(asyncio.get_running_loop().time() + last - now)
