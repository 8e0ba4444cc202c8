"""Leader: rank 0's handle on the other ranks of a tensor-parallel engine.

Rank 0 is this process: it runs the scheduler and all of decoding, the draft, and the vision tower.
The other ranks, the *followers*, run their parts of the target only. Below ``Session`` rank 0 sends
them each forward, and each commit of layer states, as a small command (``commands``). So the
scheduler and the policy, which depend on clocks and on clients, run once, and no decision has to be
equal by luck on several processes. Tokens are the same on all ranks because only rank 0 has any.

A rank that dies, hangs or fails ends the engine: the others cannot finish the sums of its forward.
A thread watches the followers' connections and the progress of rank 0's own forwards.
"""

from __future__ import annotations

import logging
import multiprocessing.connection
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from trt_eagle3.decode.memory.state import LayerStates, StateMoves
from trt_eagle3.decode.parallel.commands import (
    Close,
    Commit,
    Done,
    Drop,
    Failed,
    Here,
    Join,
    MirrorStates,
    Open,
    Run,
    RunKind,
    Start,
    packed,
)
from trt_eagle3.decode.parallel.session import ParallelSession
from trt_eagle3.engine.runtime.collectives import (
    EXCHANGE_S,
    Collectives,
    check_devices,
    open_collectives,
)
from trt_eagle3.engine.runtime.session import Session, open_session
from trt_eagle3.errors import RankFailedError, TrtEagle3Error, clip
from trt_eagle3.io.python_process import start_python
from trt_eagle3.sharding import Shard
from trt_eagle3.spec import StateSpec

__all__ = ["Leader", "Ranks"]

T = TypeVar("T")

_log = logging.getLogger("trt_eagle3")
FOLLOWER = "trt_eagle3.decode.parallel.follower"
"""Module of a follower's process."""
_POLL_S = 0.25  # of the watching thread
_REASON_S = 1.0  # for a failed rank's own reason to arrive
_END_S = 2.0  # for a follower to end after Close


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
            EnvironmentMissingError, RankFailedError: as for ``Leader``.
        """
        with self._starting:
            if self._leader is None:
                self._leader = Leader(self.size, self._device)
                for part in self._replicated:
                    _log.warning(
                        "tensor_parallel: %d does not divide %s: each rank computes it whole",
                        self.size,
                        part,
                    )
                for call in self._calls:
                    self._leader.on_failure(call)
            return self._leader

    def on_failure(self, call: Callable[[RankFailedError], object]) -> None:
        """Call ``call`` on another thread once a rank has failed."""
        with self._starting:
            self._calls.append(call)
            if self._leader is not None:
                self._leader.on_failure(call)

    def close(self) -> None:
        """End the other ranks. A later use starts new ones."""
        with self._starting:
            leader, self._leader = self._leader, None
        if leader is not None:
            leader.close()


class Leader:
    """Starts the followers, sends them commands, and watches them."""

    def __init__(self, size: int, device: str) -> None:
        """Start ``size - 1`` processes, and meet them.

        Raises:
            EnvironmentMissingError: there are too few GPUs, or a process cannot be started.
            RankFailedError: a process ended while it started.
        """
        check_devices(size, device)
        self._folder = Path(tempfile.mkdtemp(prefix="trt-eagle3-ranks-"))
        self._sending = threading.RLock()
        self._news = threading.Condition()
        self._num_done = 0
        self._failure: str | None = None
        self._on_failure: list[Callable[[RankFailedError], object]] = []
        self._closed = False
        self._numbers = iter(range(1 << 62))
        self._dropped = deque[tuple[str, int]]()
        self._launched = deque[tuple[torch.cuda.Event, float]]()
        self._collectives: Collectives | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._end = weakref.finalize(self, _end, self._processes, self._connections, self._folder)
        num_threads = max(1, torch.get_num_threads() // size)
        try:
            for rank in range(1, size):
                self._start(Start(Shard(rank, size), device, num_threads))
            watcher = threading.Thread(
                target=_watch, args=(weakref.ref(self),), name="trt-eagle3-ranks", daemon=True
            )
            watcher.start()
            self.wait()
            self.send(Join(self._folder))
            self._collectives = open_collectives(Shard(0, size), self._folder, device)
            self.wait()
        except BaseException as error:
            failure = self._failure
            self.close()
            if isinstance(error, RankFailedError) or failure is None:
                raise
            raise RankFailedError(failure) from error

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 + len(self._processes)

    def open_session(
        self, backend: str, model: Path, weights_root: Path, intermediates: Sequence[str]
    ) -> Session:
        """Open a target graph on all ranks; arguments as for ``open_session``.

        Raises:
            UserError: as for ``open_session``. RankFailedError: another rank could not open it.
        """
        assert self._collectives is not None, "the ranks have met"
        number = next(self._numbers)
        self.send(Open(number, backend, model, weights_root, tuple(intermediates)))
        local = self.together(
            lambda: open_session(
                backend,
                model,
                weights_root,
                intermediates,
                collectives=self._collectives,
            )
        )
        self.wait()
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
        self.wait()
        commit = weakref.WeakMethod(self._commit)

        def mirrored(moves: StateMoves) -> None:
            if (call := commit()) is not None:
                call(number, moves)

        states.mirror(mirrored)
        weakref.finalize(states, self._dropped.append, ("states", number))

    def _commit(self, states: int, moves: StateMoves) -> None:
        tensors = {name: t for name, t in vars(moves).items() if t is not None}
        if tensors:
            self._send_with([tensors], lambda forms, size: Commit(states, forms[0], size))

    def send_run(
        self,
        session: int,
        kind: RunKind,
        parts: Sequence[Mapping[str, Tensor]],
        reduced: Mapping[str, str],
    ) -> None:
        """Implement ``Followers.send_run``."""
        self._send_with(parts, lambda forms, size: Run(session, kind, forms, reduced, size))

    def _send_with(
        self, parts: Sequence[Mapping[str, Tensor]], command: Callable[..., object]
    ) -> None:
        """Send a command, then broadcast the tensors ``parts``."""
        collectives = self._collectives
        assert collectives is not None, "the ranks have met"
        forms, data = packed(parts, collectives.device)
        self.send(command(forms, len(data)))
        if len(data):
            self.together(lambda: collectives.broadcast(data))

    def send(self, command: object) -> None:
        """Implement ``Followers.send``."""
        self.check()
        with self._sending:
            for each in (*self._drops(), command):
                for connection in self._connections:
                    try:
                        connection.send(each)
                    except (OSError, ValueError) as error:
                        raise self._lost(error) from error

    def _drops(self) -> list[Drop]:
        found: dict[str, list[int]] = {"session": [], "states": []}
        while self._dropped:
            kind, number = self._dropped.popleft()
            found[kind].append(number)
        if not any(found.values()):
            return []
        return [Drop(tuple(found["session"]), tuple(found["states"]))]

    def together(self, work: Callable[[], T]) -> T:
        """Implement ``Followers.together``."""
        try:
            found = work()
        except RankFailedError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception):
                raise
            raise self._lost(error) from error
        if self._collectives is not None and self._collectives.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._launched.append((event, time.monotonic()))
        return found

    def wait(self) -> None:
        """Implement ``Followers.wait``."""
        followers = len(self._connections)
        with self._news:
            self._news.wait_for(lambda: self._num_done >= followers or self._failure is not None)
            self._num_done -= followers
        self.check()

    def check(self) -> None:
        """Raise if a rank has failed.

        Raises:
            RankFailedError: with the first reason.
        """
        if self._failure is not None:
            raise RankFailedError(self._failure)

    def on_failure(self, call: Callable[[RankFailedError], object]) -> None:
        """Call ``call`` on another thread once a rank has failed."""
        self._on_failure.append(call)
        if self._failure is not None:
            self._report()

    def close(self) -> None:
        """End the followers, and leave the group."""
        if self._closed:
            return
        self._closed = True
        if self._failure is None:
            self._finish()
        with self._sending:
            for connection in self._connections:
                with suppress(OSError, ValueError):
                    connection.send(Close())
        end = time.monotonic() + _END_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        self._end()
        if self._collectives is not None:
            self._collectives.close()
            self._collectives = None

    def _finish(self) -> None:
        """Wait until this rank's launches are done: they need those of the others."""
        if self._collectives is not None and self._collectives.device.type == "cuda":
            torch.cuda.synchronize(self._collectives.device)

    def _start(self, command: Start) -> None:
        ours, theirs = socket.socketpair()
        self._connections.append(Connection(ours.detach()))
        with theirs:
            what = f"rank {command.shard.rank}"
            self._processes.append(start_python(FOLLOWER, theirs.fileno(), what))
        self._connections[-1].send(command)

    def _lost(self, error: Exception) -> RankFailedError:
        """Return the error for a command that failed on this rank, perhaps because of another."""
        if isinstance(error, TrtEagle3Error):
            reason = str(error)
        else:
            reason = f"{type(error).__name__}: {clip(error)}"
        with self._news:
            # a dead rank ends the connections to it; its own reason follows at once
            self._news.wait_for(lambda: self._failure is not None, _REASON_S)
        self._fail(f"rank 0: {reason}")
        assert self._failure is not None
        return RankFailedError(self._failure)

    def _fail(self, reason: str) -> None:
        """Remember the first failure, and end the followers."""
        with self._news:
            if self._failure is not None or self._closed:
                return
            self._failure = f"tensor_parallel: {reason}"
            self._news.notify_all()
        for process in self._processes:
            process.kill()
        self._report()
        if self._collectives is not None:
            self._collectives.abort()

    def _report(self) -> None:
        """Make the calls of ``on_failure`` on a thread, because each may wait for this one."""
        assert self._failure is not None
        error, calls = RankFailedError(self._failure), list(self._on_failure)

        def report() -> None:
            for call in calls:
                call(error)

        threading.Thread(target=report, name="trt-eagle3-rank-failed", daemon=True).start()

    def _look(self) -> bool:
        """Read the followers' messages and check progress; False once nothing can follow."""
        for connection in multiprocessing.connection.wait(self._connections, _POLL_S):
            assert isinstance(connection, Connection)
            rank = 1 + self._connections.index(connection)
            try:
                message = connection.recv()
            except (EOFError, OSError):
                self._fail(f"rank {rank}: {_end_of(self._processes[rank - 1])}")
                return False
            if isinstance(message, Failed):
                self._fail(f"rank {rank}: {message.reason}")
            elif isinstance(message, (Done, Here)):
                with self._news:
                    self._num_done += 1
                    self._news.notify_all()
        while self._launched and self._launched[0][0].query():
            self._launched.popleft()
            if self._launched:  # it can only begin now
                self._launched[0] = (self._launched[0][0], time.monotonic())
        if self._launched and time.monotonic() - self._launched[0][1] > EXCHANGE_S:
            self._fail(f"a forward did not end within {EXCHANGE_S:g} s: a rank hangs")
        return self._failure is None and not self._closed


def _watch(leader: weakref.ref[Leader]) -> None:
    """Watch the followers of ``leader`` while it lives."""
    while (there := leader()) is not None and there._look():
        del there


def _end_of(process: subprocess.Popen[bytes]) -> str:
    """Describe how a process ended."""
    try:
        status = process.wait(_REASON_S)
    except subprocess.TimeoutExpired:
        return "its process closed its connection"
    if status >= 0:
        return f"its process ended with status {status}. See the log."
    name = next((s.name for s in signal.Signals if s == -status), f"signal {-status}")
    memory = " Is there enough memory?" if -status == signal.SIGKILL else ""
    return f"its process was ended by {name}.{memory}"


def _end(
    processes: Sequence[subprocess.Popen[bytes]], connections: Sequence[Connection], folder: Path
) -> None:
    for connection in connections:
        connection.close()
    for process in processes:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
