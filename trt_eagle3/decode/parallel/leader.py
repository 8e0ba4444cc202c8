"""Leader: rank 0's handle on the other ranks of a tensor-parallel engine.

Rank 0 is this process: it runs the scheduler and all of decoding, the draft, and the vision tower.
The other ranks, the *followers*, run their parts of the target only. Below ``Session`` rank 0 sends
them each forward, and each commit of layer states, as a small command (``commands``). So the
scheduler and the policy, which depend on clocks and on clients, run once, and no decision has to be
equal by luck on several processes. Tokens are the same on all ranks because only rank 0 has any.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from trt_eagle3.decode.memory.state import LayerStates, StateMoves
from trt_eagle3.decode.parallel.commands import (
    Commit,
    Drop,
    MirrorStates,
    Open,
    Run,
    RunKind,
    packed,
)
from trt_eagle3.decode.parallel.processes import processes_for
from trt_eagle3.decode.parallel.session import ParallelSession
from trt_eagle3.engine.runtime.collectives import EXCHANGE_S, Collectives
from trt_eagle3.engine.runtime.session import Session, open_session
from trt_eagle3.errors import RankFailedError, TrtEagle3Error, clip
from trt_eagle3.spec import StateSpec

__all__ = ["Leader", "Links", "Ranks"]

T = TypeVar("T")

_log = logging.getLogger("trt_eagle3")


class Links(Protocol):
    """The connections to the followers (``processes.Processes``)."""

    def send(self, command: object) -> None:
        """Send a command to every follower.

        Raises:
            RankFailedError: a rank has failed.
        """
        ...

    def wait(self) -> None:
        """Wait for an answer of every follower.

        Raises:
            RankFailedError: a rank has failed.
        """
        ...

    def check(self) -> None:
        """Raise if a rank has failed.

        Raises:
            RankFailedError: with the first reason.
        """
        ...

    def lost(self, reason: str) -> RankFailedError:
        """Return the error for work that failed on rank 0, perhaps because of another rank."""
        ...

    def on_failure(self, call: Callable[[RankFailedError], object]) -> None:
        """Call ``call`` on another thread once a rank has failed."""
        ...

    def close(self) -> None:
        """Let the followers release everything. Rank 0's launches must be done."""
        ...


class Leader:
    """Opens sessions and states on all ranks, and sends their commands.

    Attributes:
        links: the connections to the followers.
    """

    def __init__(self, links: Links, collectives: Collectives) -> None:
        """``collectives``: rank 0's."""
        self.links = links
        self._collectives = collectives
        self._on_cuda = collectives.device.type == "cuda"
        self._numbers = itertools.count()
        self._dropped = deque[tuple[str, int]]()
        self._launched = deque[tuple[torch.cuda.Event, float]]()

    def open_session(
        self, backend: str, model: Path, weights_root: Path, intermediates: Sequence[str]
    ) -> Session:
        """Open a target graph on all ranks; arguments as for ``runtime.session.open_session``.

        Raises:
            RankFailedError: a rank could not open it.
        """
        number = next(self._numbers)
        self.send(Open(number, backend, model, weights_root, tuple(intermediates)))
        opened = partial(open_session, backend, model, weights_root, intermediates)
        local = self.together(lambda: opened(collectives=self._collectives))
        self.links.wait()
        session = ParallelSession(number, local, self)
        weakref.finalize(session, self._dropped.append, ("session", number))
        return session

    def mirror(
        self,
        states: LayerStates,
        specs: Sequence[StateSpec],
        num_slots: int,
        max_sequences: int,
        num_snapshots: int,
    ) -> None:
        """Let every rank keep states like ``states``; arguments as for ``layer_states``."""
        number = next(self._numbers)
        buffers = {name: buffer.data_ptr() for name, buffer in states.bindings()}
        sizes = (num_slots, max_sequences, num_snapshots)
        self.send(MirrorStates(number, tuple(specs), *sizes, buffers))
        self.links.wait()
        states.mirror(partial(self._commit, number))
        weakref.finalize(states, self._dropped.append, ("states", number))

    def send(self, command: object) -> None:
        """Implement ``Followers.send``."""
        for drop in self._drops():
            self.links.send(drop)
        self.links.send(command)

    def send_run(
        self,
        session: int,
        kind: RunKind,
        parts: Sequence[Mapping[str, Tensor]],
        reduced: Mapping[str, str],
    ) -> None:
        """Implement ``Followers.send_run``."""
        forms, data = packed(parts, self._collectives.device)
        self.send(Run(session, kind, forms, reduced, len(data)))
        self._broadcast(data)

    def together(self, work: Callable[[], T]) -> T:
        """Implement ``Followers.together``."""
        try:
            found = work()
        except RankFailedError:
            raise
        except Exception as error:
            known = isinstance(error, TrtEagle3Error)
            reason = str(error) if known else f"{type(error).__name__}: {clip(error)}"
            raise self.links.lost(reason) from error
        if self._on_cuda:
            event = torch.cuda.Event()
            event.record()
            self._launched.append((event, time.monotonic()))
        return found

    def wait(self) -> None:
        """Implement ``Followers.wait``."""
        self.links.wait()

    def hangs(self) -> str | None:
        """Describe a forward that does not end, or return None. Called on a watching thread."""
        launched = self._launched
        while launched and launched[0][0].query():
            launched.popleft()
            if launched:  # it can only begin now
                launched[0] = (launched[0][0], time.monotonic())
        if launched and time.monotonic() - launched[0][1] > EXCHANGE_S:
            return f"a forward did not end within {EXCHANGE_S:g} s: a rank hangs"
        return None

    def close(self) -> None:
        """Release everything on the followers."""
        if self._on_cuda:
            try:
                self.links.check()
                torch.cuda.synchronize(self._collectives.device)  # launches need the followers'
            except RankFailedError:
                _log.debug("the ranks have failed already")
        self.links.close()

    def _commit(self, states: int, moves: StateMoves) -> None:
        tensors = {name: t for name, t in vars(moves).items() if t is not None}
        if tensors:
            (forms,), data = packed([tensors], self._collectives.device)
            self.send(Commit(states, forms, len(data)))
            self._broadcast(data)

    def _broadcast(self, data: Tensor) -> None:
        if len(data):
            self.together(lambda: self._collectives.broadcast(data))

    def _drops(self) -> list[Drop]:
        """Return the command to release what rank 0 has released, if there is anything."""
        found: dict[str, list[int]] = {"session": [], "states": []}
        while self._dropped:
            kind, number = self._dropped.popleft()
            found[kind].append(number)
        if not any(found.values()):
            return []
        return [Drop(tuple(found["session"]), tuple(found["states"]))]


class Ranks:
    """The ranks of an engine, started at first use."""

    def __init__(self, size: int, device: str, replicated: Sequence[str] = ()) -> None:
        """Describe the ranks; starts nothing.

        ``replicated``: parts of the target that every rank computes whole, for a warning.
        """
        self.size = size
        self._device = device
        self._replicated = replicated
        self._leader: Leader | None = None
        self._starting = threading.Lock()
        self._calls: list[Callable[[RankFailedError], object]] = []

    def started(self) -> Leader:
        """Return the leader; the first call starts the other ranks.

        Raises:
            EnvironmentMissingError, RankFailedError, UserError: as for ``processes_for``.
        """
        with self._starting:
            if self._leader is None:
                self._leader = self._start()
            return self._leader

    def on_failure(self, call: Callable[[RankFailedError], object]) -> None:
        """Call ``call`` on another thread once a rank has failed."""
        with self._starting:
            self._calls.append(call)
            if self._leader is not None:
                self._leader.links.on_failure(call)

    def close(self) -> None:
        """Release everything on the other ranks."""
        with self._starting:
            leader, self._leader = self._leader, None
        if leader is not None:
            leader.close()

    def _start(self) -> Leader:
        for part in self._replicated:
            _log.warning(
                "tensor_parallel: %d does not divide %s: each rank computes it whole",
                self.size,
                part,
            )
        processes = processes_for(self.size, self._device)
        leader = Leader(processes, processes.collectives)
        processes.watch(leader.hangs)
        for call in self._calls:
            processes.on_failure(call)
        return leader
