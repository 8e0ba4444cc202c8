"""Processes: the other ranks of an engine as processes of this machine.

A thread watches them. A rank that dies, hangs or fails ends the engine, because the others cannot
finish the sums of its forward: the first reason is kept, and all processes are killed.

The processes outlive their engine, for the next engine of this process, and end with this process.
On CUDA they have to: torch counts the meetings of a process, and two processes with other counts
never meet (``c10d::symmetric_memory::StoreExchange``, torch 2.11).
"""

from __future__ import annotations

import multiprocessing.connection
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from trt_eagle3.decode.parallel.commands import Close, Done, Failed, Here, Join, Reset, Start
from trt_eagle3.engine.runtime.collectives import Collectives, check_devices, open_collectives
from trt_eagle3.errors import RankFailedError, UserError
from trt_eagle3.io.python_process import start_python
from trt_eagle3.sharding import Shard

__all__ = ["FOLLOWER", "Processes", "processes_for"]

FOLLOWER = "trt_eagle3.decode.parallel.follower"
"""Module of a follower's process."""
_POLL_S = 0.25  # of the watching thread
_REASON_S = 1.0  # for a failed rank's own reason to arrive
_END_S = 2.0  # for a follower to end after Close


def processes_for(size: int, device: str) -> Processes:
    """Return processes that have met: those of an engine that has closed, or new ones.

    Raises:
        UserError: another engine of this process has several ranks; or on CUDA, an earlier engine
            had another number of them, or one has failed.
        EnvironmentMissingError: there are too few GPUs, or a process cannot be started.
        RankFailedError: a process ended while it started.
    """
    with _POOL.lock:
        known = _POOL.last
        if known is not None and known.in_use:
            raise UserError(
                "tensor_parallel: this process runs an engine of several ranks already. Close it, "
                "or use another process."
            )
        if known is not None and known.serves(size, device):
            known.in_use = True
            return known
        if known is not None:
            if device == known.device == "cuda":
                failed = ", and one has failed" if known.failed else ""
                raise UserError(
                    f"tensor_parallel: this process has had {known.size} ranks{failed}: torch "
                    f"cannot make {size} others. Use a new process."
                )
            _POOL.last = None
            known.end()
        made = Processes(size, device)
        _POOL.last = made
        try:
            made.join()
        except BaseException as error:
            made.end()
            if not isinstance(error, RankFailedError):
                made.check()  # a dead process is the better reason
            raise
        return made


class Processes:
    """The processes of ranks 1 and above; implements ``leader.Links``.

    Attributes:
        size, device: number of ranks, and what they run on. in_use: whether an engine has them.
    """

    def __init__(self, size: int, device: str) -> None:
        """Start ``size - 1`` processes.

        Raises:
            EnvironmentMissingError: there are too few GPUs, or a process cannot be started.
        """
        check_devices(size, device)
        self.size = size
        self.device = device
        self.in_use = True
        self._sending = threading.Lock()
        self._news = threading.Condition()
        self._num_done = 0
        self._failure: str | None = None
        self._calls: list[Callable[[RankFailedError], object]] = []
        self._ended = False
        self._hangs: Callable[[], str | None] = lambda: None
        self._collectives: Collectives | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="trt-eagle3-ranks-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._kill = weakref.finalize(self, _end, self._processes, self._connections, self._folder)
        num_threads = max(1, torch.get_num_threads() // size)
        try:
            for rank in range(1, size):
                self._start(Start(Shard(rank, size), device, num_threads))
        except BaseException:
            self._kill()
            raise
        threading.Thread(
            target=_watch, args=(weakref.ref(self),), name="trt-eagle3-ranks", daemon=True
        ).start()

    @property
    def collectives(self) -> Collectives:
        """Rank 0's exchanges."""
        assert self._collectives is not None, "the processes have not met"
        return self._collectives

    @property
    def failed(self) -> bool:
        """Whether a rank has failed."""
        return self._failure is not None

    def serves(self, size: int, device: str) -> bool:
        """Return whether another engine can use these processes."""
        return (self.size, self.device) == (size, device) and not self.failed and not self._ended

    def join(self) -> None:
        """Meet the processes, once they are ready.

        Raises:
            RankFailedError: a process ended while it started.
            EnvironmentMissingError, UserError: as for ``open_collectives``.
        """
        if self.device == "cuda":
            torch.zeros(1, device="cuda")  # what takes long comes before the ranks meet
        self.wait()
        self.send(Join(self._folder))
        self._collectives = open_collectives(Shard(0, self.size), self._folder, self.device)
        self.wait()

    def watch(self, hangs: Callable[[], str | None]) -> None:
        """Call ``hangs`` from time to time; a text that it returns is a failure."""
        self._hangs = hangs

    def send(self, command: object) -> None:
        """Send a command to every process.

        Raises:
            RankFailedError: a rank has failed.
        """
        self.check()
        with self._sending:
            for connection in self._connections:
                try:
                    connection.send(command)
                except (OSError, ValueError) as error:
                    raise self.lost(str(error)) from error

    def wait(self) -> None:
        """Wait for an answer of every process.

        Raises:
            RankFailedError: a rank has failed.
        """
        wanted = self.size - 1
        with self._news:
            self._news.wait_for(lambda: self._num_done >= wanted or self._failure is not None)
            self._num_done -= wanted
        self.check()

    def check(self) -> None:
        """Raise if a rank has failed.

        Raises:
            RankFailedError: with the first reason.
        """
        if self._failure is not None:
            raise RankFailedError(self._failure)

    def lost(self, reason: str) -> RankFailedError:
        """Return the error for work that failed on rank 0, perhaps because of another rank."""
        with self._news:
            # a dead rank ends the connections to it at once; then its end is noticed
            self._news.wait_for(lambda: self._failure is not None, _REASON_S)
        self._fail(f"rank 0: {reason}")
        return RankFailedError(self._failure or reason)

    def on_failure(self, call: Callable[[RankFailedError], object]) -> None:
        """Call ``call`` on another thread once a rank has failed."""
        self._calls.append(call)
        if self._failure is not None:
            self._report()

    def close(self) -> None:
        """Let the processes release everything, for the next engine of this process.

        Rank 0's launches must be done.
        """
        if not self.in_use:
            return
        self._calls, self._hangs = [], lambda: None
        try:
            self.send(Reset())
            self.wait()
        except RankFailedError:
            self.end()
        self.in_use = False

    def end(self) -> None:
        """End the processes, and leave the group."""
        if self._ended:
            return
        self._ended, self.in_use = True, False
        with self._sending:
            for connection in self._connections:
                with suppress(OSError, ValueError):
                    connection.send(Close())
        end = time.monotonic() + _END_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        self._kill()
        if self._collectives is not None:
            self._collectives.close()

    def _start(self, command: Start) -> None:
        ours, theirs = socket.socketpair()
        self._connections.append(Connection(ours.detach()))
        with theirs:
            what = f"rank {command.shard.rank}"
            self._processes.append(start_python(FOLLOWER, theirs.fileno(), what))
        self._connections[-1].send(command)

    def _fail(self, reason: str) -> None:
        """Keep the first failure, and kill the processes."""
        with self._news:
            if self._failure is not None or self._ended:
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
        error, calls = RankFailedError(self._failure or ""), list(self._calls)

        def report() -> None:
            for call in calls:
                call(error)

        threading.Thread(target=report, name="trt-eagle3-rank-failed", daemon=True).start()

    def look(self) -> bool:
        """Read the processes' messages, for a while; return False once nothing can follow."""
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
        if (reason := self._hangs()) is not None:
            self._fail(reason)
        return self._failure is None and not self._ended


class _Pool:
    """The ranks of this process: at most one group, in use or for the next engine."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.last: Processes | None = None


_POOL = _Pool()


def _watch(processes: weakref.ref[Processes]) -> None:
    """Watch ``processes`` while they are referenced."""
    while (there := processes()) is not None and there.look():
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
