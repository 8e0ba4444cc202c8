"""FairCache: values by key, bounded in bytes and shared fairly among clients."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["Entry", "FairCache"]

_IDLE_SECONDS = 300.0  # a client that used nothing for this long loses its values first

V = TypeVar("V")


@dataclass(frozen=True)
class Entry(Generic[V]):
    """A value, its size, and the client that used it last."""

    key: bytes
    value: V
    num_bytes: int
    client: str


@dataclass
class _Client:
    """The values that a client used: least recently used first, and their bytes."""

    keys: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    num_bytes: int = 0
    used_at: float = 0.0


@dataclass
class _Kept(Generic[V]):
    value: V
    num_bytes: int
    clients: set[str]


class FairCache(Generic[V]):
    """At most ``max_bytes`` of values; thread-safe.

    A value stays while any client that used it keeps it. If room is lacking, a client gives up its
    least recently used value: the client that has been idle longest, if idle for five minutes, else
    the one whose values take most bytes. So a client with many values evicts its own, not those of
    others. With one client this is a plain LRU cache.

    Attributes:
        max_bytes: 0: nothing is kept. clock: seconds.
        num_hits, num_misses: calls of ``get`` that found a value, and those that did not.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.clock = time.monotonic
        self.num_hits = self.num_misses = 0
        self._lock = threading.Lock()
        self._kept: dict[bytes, _Kept[V]] = {}
        self._clients: OrderedDict[str, _Client] = OrderedDict()  # longest idle first
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return self._num_bytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def get(self, key: bytes, client: str = "") -> V | None:
        """Return the value of ``key`` for ``client``; None if there is none."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                self.num_misses += 1
                return None
            self.num_hits += 1
            self._use(key, kept, client)
            return kept.value

    def put(self, key: bytes, value: V, num_bytes: int, client: str = "") -> list[Entry[V]]:
        """Keep ``value`` of ``num_bytes`` for ``client``; returns the values that are not kept.

        These are evicted ones, or ``value`` itself if it is larger than the cache. A value that is
        kept already stays.
        """
        with self._lock:
            if num_bytes > self.max_bytes:
                return [Entry(key, value, num_bytes, client)]
            if key not in self._kept:
                self._kept[key] = _Kept(value, num_bytes, set())
                self._num_bytes += num_bytes
            self._use(key, self._kept[key], client)
            evicted = []
            while self._num_bytes > self.max_bytes:
                evicted += self._give_up(self._victim())
            return evicted

    def restart_counts(self) -> None:
        """Reset hits and misses."""
        self.num_hits = self.num_misses = 0

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._kept.clear()
            self._clients.clear()
            self._num_bytes = 0

    def _use(self, key: bytes, kept: _Kept[V], client: str) -> None:
        """Make ``kept`` the value that ``client`` used last."""
        found = self._clients.setdefault(client, _Client())
        if client not in kept.clients:
            kept.clients.add(client)
            found.num_bytes += kept.num_bytes
        found.keys[key] = None
        found.keys.move_to_end(key)
        found.used_at = self.clock()
        self._clients.move_to_end(client)

    def _victim(self) -> str:
        """Return the client that gives up a value."""
        idlest = next(iter(self._clients))
        if self.clock() - self._clients[idlest].used_at > _IDLE_SECONDS:
            return idlest
        return max(self._clients, key=lambda name: self._clients[name].num_bytes)

    def _give_up(self, name: str) -> list[Entry[V]]:
        """Take a client's least recently used value away; returns it if no other client has it."""
        client = self._clients[name]
        key, _ = client.keys.popitem(last=False)
        kept = self._kept[key]
        kept.clients.discard(name)
        client.num_bytes -= kept.num_bytes
        if not client.keys:
            del self._clients[name]
        if kept.clients:
            return []
        del self._kept[key]
        self._num_bytes -= kept.num_bytes
        return [Entry(key, kept.value, kept.num_bytes, name)]
