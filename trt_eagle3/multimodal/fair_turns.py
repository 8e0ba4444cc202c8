"""FairTurns: share a few places fairly among many clients."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from trt_eagle3.multimodal.caller import POLL_S, Caller

__all__ = ["FairTurns"]


class FairTurns:
    """A number of places, shared fairly among clients and their requests.

    A free place goes to the client that holds the fewest, then to its request that holds the
    fewest. Ties go to the client that was served longest ago. If there are several places, no
    client holds all of them, so an endless request leaves a place for other clients.
    """

    def __init__(self, count: int) -> None:
        """``count``: places, at least 1."""
        self._free = count
        self._most = max(count - 1, 1)
        self._changed = threading.Condition()
        self._waiting: list[_Ticket] = []
        self._held_by_client: Counter[str] = Counter()
        self._held_by_request: Counter[int] = Counter()
        self._served: dict[str, int] = {}
        self._num_served = 0

    @contextmanager
    def turn(self, caller: Caller) -> Iterator[None]:
        """Wait for a place and hold it.

        Raises:
            RequestCancelledError: the request was cancelled first.
        """
        ticket = _Ticket(caller)
        with self._changed:
            self._waiting.append(ticket)
            self._grant()
        try:
            self._wait(ticket)
            yield
        finally:
            self._leave(ticket)

    def _wait(self, ticket: _Ticket) -> None:
        while True:
            ticket.caller.check()
            with self._changed:
                if self._changed.wait_for(lambda: ticket.granted, POLL_S):
                    return

    def _leave(self, ticket: _Ticket) -> None:
        with self._changed:
            if ticket.granted:
                self._free += 1
                self._hold(ticket, -1)
            else:
                self._waiting.remove(ticket)
            self._grant()
            self._forget(ticket.client)

    def _grant(self) -> None:
        """Grant free places to waiting tickets. The caller holds the lock."""
        while self._free and (
            allowed := [t for t in self._waiting if self._held_by_client[t.client] < self._most]
        ):
            ticket = min(allowed, key=self._rank)
            self._waiting.remove(ticket)
            ticket.granted = True
            self._free -= 1
            self._hold(ticket, 1)
            self._num_served += 1
            self._served[ticket.client] = self._num_served
            self._changed.notify_all()

    def _rank(self, ticket: _Ticket) -> tuple[int, int, int]:
        client = ticket.client
        held = self._held_by_client[client], self._held_by_request[ticket.caller.number]
        return *held, self._served.get(client, 0)

    def _hold(self, ticket: _Ticket, change: int) -> None:
        client, number = ticket.client, ticket.caller.number
        self._held_by_client[client] += change
        self._held_by_request[number] += change
        if not self._held_by_request[number]:
            del self._held_by_request[number]
        if not self._held_by_client[client]:
            del self._held_by_client[client]

    def _forget(self, client: str) -> None:
        """Drop the record of a client without a held or awaited place."""
        waits = any(ticket.client == client for ticket in self._waiting)
        if not waits and client not in self._held_by_client:
            self._served.pop(client, None)


class _Ticket:
    """A waiting caller. A request without a known client counts as its own client."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.client = caller.client or f"request {caller.number}"
        self.granted = False
