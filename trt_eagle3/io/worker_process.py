"""WorkerProcess: processes for untrusted input, started on demand and replaced if they die."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trt_eagle3.errors import EnvironmentMissingError, RequestCancelledError
from trt_eagle3.io.child_environment import PACKAGE_ROOT, child_environment

__all__ = ["WorkerProcess"]

_POLL_S = 0.05  # delay until a cancelled request is noticed
_GRACE_S = 0.5  # time for a worker to stop cancelled work before it is killed
_BLOCK_BYTES = 1 << 20

_Process = subprocess.Popen[bytes]


def _never() -> bool:
    return False


class WorkerProcess:
    """A script that answers each line of JSON with a line of JSON, in up to ``count`` processes.

    An empty line tells a worker to stop its current work, and gets no answer of its own. A worker
    that does not stop is killed.
    """

    def __init__(
        self, script: str, what: str, preface: Callable[[], bytes] = bytes, *, count: int = 1
    ) -> None:
        """
        Args:
            script: its file. ``sys.argv[1]`` is this program's ``sys.path`` as JSON.
            what: the kind of input, for errors.
            preface: returns a line that each process reads first; empty: none.
        """
        self._script, self._what, self._preface, self._count = script, what, preface, count
        self._reset()
        atexit.register(self.close)

    def _reset(self) -> None:
        self._places = threading.Semaphore(self._count)
        self._lock = threading.Lock()
        self._asking_all = threading.Lock()
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._owner = os.getpid()

    def ask(self, request: bytes, cancelled: Callable[[], bool] = _never) -> dict[str, Any] | None:
        """Return a worker's answer; None if the request ended the worker.

        Args:
            request: JSON, without line ends.
            cancelled: whether the answer is no longer needed.
        Raises:
            RequestCancelledError: ``cancelled()`` became true; the worker is idle again.
            EnvironmentMissingError: no process can be started.
        """
        with self._place(cancelled):
            line = self._exchanged(request, cancelled)
        if not line.endswith(b"\n"):
            return None
        if cancelled():
            raise _left()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask_all(self, request: bytes) -> None:
        """Send ``request`` to each of the ``count`` workers, starting those that do not run.

        Raises:
            EnvironmentMissingError: no process can be started.
        """
        with contextlib.ExitStack() as stack:
            with self._asking_all:  # two callers with a place each would deadlock
                for _ in range(self._count):
                    stack.enter_context(self._place(_never))
            processes = [self._take() for _ in range(self._count)]
            for process in processes:
                self._put_back(process, usable=_exchange(process, request, _never).endswith(b"\n"))

    def close(self) -> None:
        """End all processes at once. A later ``ask`` starts new ones."""
        if self._owner != os.getpid():
            return
        with self._lock:
            idle, at_work = self._idle, self._all.difference(self._idle)
            self._idle, self._all = [], set()
        for process in at_work:
            process.kill()  # the waiting thread then closes its pipes
        for process in idle:
            _end(process)

    @contextlib.contextmanager
    def _place(self, cancelled: Callable[[], bool]) -> Iterator[None]:
        """Wait for one of ``count`` places and hold it."""
        if self._owner != os.getpid():  # a fork of this program starts its own workers
            self._reset()
        while not self._places.acquire(timeout=_POLL_S):
            if cancelled():
                raise _left()
        try:
            if cancelled():
                raise _left()
            yield
        finally:
            self._places.release()

    def _exchanged(self, request: bytes, cancelled: Callable[[], bool]) -> bytes:
        process, line = self._take(), b""
        try:
            line = _exchange(process, request, cancelled)
        finally:
            self._put_back(process, usable=line.endswith(b"\n"))
        return line

    def _take(self) -> _Process:
        """Return an idle worker that still runs, or a new one."""
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
                self._all.discard(process)
                _end(process)
        process = self._start()
        with self._lock:
            self._all.add(process)
        return process

    def _put_back(self, process: _Process, *, usable: bool) -> None:
        with self._lock:
            if usable and process in self._all:  # else close() has removed it
                self._idle.append(process)
                return
            self._all.discard(process)
        _end(process)

    def _start(self) -> _Process:
        # Inside Triton's stub, sys.executable may be the stub.
        python = Path(sys.prefix, "bin", "python3")
        command = [str(python if python.exists() else sys.executable), "-I", "-S", self._script]
        try:
            process = subprocess.Popen(
                [*command, json.dumps([*sys.path, PACKAGE_ROOT])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
                start_new_session=True,  # keeps Ctrl-C from it
            )
        except OSError as error:
            raise EnvironmentMissingError(
                f"{self._what}: cannot start {command[0]}: {error.strerror}. It needs a separate "
                "process."
            ) from error
        if line := self._preface():
            _write(process, line)
        return process


def _exchange(process: _Process, request: bytes, cancelled: Callable[[], bool]) -> bytes:
    """Send ``request`` and read the answer, which lacks the line end if the process ended first.

    Raises:
        RequestCancelledError: the process did not stop within ``_GRACE_S`` of a cancellation.
    """
    assert process.stdout is not None
    _write(process, request)
    descriptor, blocks = process.stdout.fileno(), [b""]
    poll, stop_by = select.poll(), float("inf")
    poll.register(descriptor, select.POLLIN)
    while not blocks[-1].endswith(b"\n"):
        if poll.poll(1000 * _POLL_S):
            block = os.read(descriptor, _BLOCK_BYTES)
            if not block:
                break
            blocks.append(block)
        elif time.monotonic() > stop_by:
            raise _left()
        elif stop_by == float("inf") and cancelled():
            stop_by = time.monotonic() + _GRACE_S
            _write(process, b"")
    return b"".join(blocks)


def _write(process: _Process, line: bytes) -> None:
    """Write a line. If the worker has ended, reading its answer detects it."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line + b"\n")
        process.stdin.flush()


def _end(process: _Process) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _left() -> RequestCancelledError:
    return RequestCancelledError("cancelled while a process worked on it.")
