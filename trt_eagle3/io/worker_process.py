"""Processes that run what strangers wrote: started when they are first asked, replaced when a
request was their end.
"""

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

import trt_eagle3
from trt_eagle3.errors import EnvironmentMissingError, RequestCancelledError
from trt_eagle3.io.child_environment import child_environment

__all__ = ["WorkerProcess"]

_POLL_S = 0.05  # how soon a request that was cancelled is noticed
_GRACE_S = 0.5  # in which a worker may stop work that was cancelled, before it is killed
_BLOCK_BYTES = 1 << 20
_ROOT = str(Path(trt_eagle3.__file__).resolve().parent.parent)  # also where it is not on the path

_Process = subprocess.Popen[bytes]


def _never() -> bool:
    return False


class WorkerProcess:
    """A script that reads a line of JSON and writes a line of JSON, again and again, in up to
    ``count`` processes.

    An empty line asks a worker to stop what it does; it gets no answer of its own. Workers that
    cannot stop are killed.
    """

    def __init__(
        self, script: str, what: str, preface: Callable[[], bytes] = bytes, *, count: int = 1
    ) -> None:
        """``script``: its file; ``sys.argv[1]`` is this program's ``sys.path`` as JSON. ``what`` it
        works on, for errors. ``preface``: a line that it reads first; empty: none.
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
        """A worker's answer; None where the request was its end.

        Args:
            request: JSON, without line ends.
            cancelled: whether nobody waits for the answer any more.
        Raises:
            RequestCancelledError: the request was cancelled; its worker is free again.
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
        """Ask all ``count`` workers the same, so that each is started and has done it once.

        Raises:
            EnvironmentMissingError: no process can be started.
        """
        with contextlib.ExitStack() as stack:
            with self._asking_all:  # two that hold a place each would wait for each other
                for _ in range(self._count):
                    stack.enter_context(self._place(_never))
            processes = [self._take() for _ in range(self._count)]
            for process in processes:
                self._put_back(process, usable=_exchange(process, request, _never).endswith(b"\n"))

    def close(self) -> None:
        """End the processes, whatever they do; asked again, others start."""
        if self._owner != os.getpid():
            return
        with self._lock:
            idle, at_work = self._idle, self._all.difference(self._idle)
            self._idle, self._all = [], set()
        for process in at_work:
            process.kill()  # whose request's thread sees that it ended, and closes its pipes
        for process in idle:
            _end(process)

    @contextlib.contextmanager
    def _place(self, cancelled: Callable[[], bool]) -> Iterator[None]:
        """One of ``count`` places, once one is free."""
        if self._owner != os.getpid():  # a fork of this program has workers of its own
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
        """A worker that lives."""
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
            if usable and process in self._all:  # else this was closed meanwhile
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
                [*command, json.dumps([*sys.path, _ROOT])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
                start_new_session=True,  # Ctrl-C is its parent's
            )
        except OSError as error:
            raise EnvironmentMissingError(
                f"{self._what}: cannot start {command[0]}: {error.strerror}. It is worked on in a "
                "process."
            ) from error
        if line := self._preface():
            _write(process, line)
        return process


def _exchange(process: _Process, request: bytes, cancelled: Callable[[], bool]) -> bytes:
    """The line that ``process`` answers; without a line end where it ended first, or did not stop
    when the request was cancelled.
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
    """A worker that has ended is noticed when its answer is read."""
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
