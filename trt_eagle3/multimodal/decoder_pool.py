"""DecoderPool: processes that decode images and videos, and can be killed and replaced."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from trt_eagle3.errors import EnvironmentMissingError, RequestCancelledError, UserError
from trt_eagle3.io.child_environment import PACKAGE_ROOT, child_environment
from trt_eagle3.io.python_process import interpreter as _interpreter
from trt_eagle3.multimodal.caller import POLL_S, Caller
from trt_eagle3.multimodal.decoder_process import MAX_MESSAGE_BYTES
from trt_eagle3.multimodal.fair_turns import FairTurns
from trt_eagle3.multimodal.media_job import MediaJob, MediaPart
from trt_eagle3.multimodal.shared_arena import SharedArena

__all__ = ["DecoderPool"]

_PROGRAM = "trt_eagle3.multimodal.decoder_process"
# seconds until a process must be ready; a busy machine needs several
_START_S = 60.0
# a job of a cancelled request may end within this time, which keeps its process alive
_GRACE_S = 0.1
_MOST = 8
_KEPT_BYTES = 64 << 20  # of shared memory that a process keeps between jobs
# One thread for each library. A process keeps up to 128 MiB of freed memory: mapping fresh pages
# for each photograph takes a third of the decoding time.
_SETTINGS = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}


class DecoderPool:
    """At most ``count`` processes, started on demand and shared fairly by clients (`FairTurns`)."""

    def __init__(self, count: int | None = None) -> None:
        """``count``: at least 2. Default: one more than the cores of this process, at most 9."""
        self._turns = FairTurns(count or min(_MOST, max(2, len(os.sched_getaffinity(0)))) + 1)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._finalizer = weakref.finalize(
            self, _stop_all, self._idle, self._all, self._lock, self._closed
        )

    @contextlib.contextmanager
    def run(self, job: MediaJob, data: bytes, caller: Caller) -> Iterator[Iterator[MediaPart]]:
        """`run_job` in another process: a `JobRunner` for one caller.

        Leaving the context frees the process. If parts are unread, the process is replaced.

        Raises:
            UserError: as for `run_job`; or the job took longer than ``job.timeout_s``, or its
                process died.
            RequestCancelledError: the request was cancelled, or the pool closed.
            EnvironmentMissingError: as for `run_job`; or a process does not start.
        """
        caller = caller.unless(self._closed.is_set)
        with self._turns.turn(caller):
            process = self._take(caller)
            try:
                while not process.begin(job, data, caller):
                    if process.is_new:
                        raise process.did_not_start()
                    # killed while it was idle, for example by the out-of-memory killer
                    self._put_back(process)
                    process = self._take(caller)
                with contextlib.closing(process.parts(job, caller)) as parts:
                    yield parts
            finally:
                self._put_back(process)

    def start_one(self) -> None:
        """Start a process for the first job, if none runs; returns at once.

        Raises:
            EnvironmentMissingError: it cannot be started.
        """
        with self._lock:
            if not self._all and not self._closed.is_set():
                process = _Process()
                self._all.add(process)
                self._idle.append(process)

    def close(self) -> None:
        """End all processes and cancel running jobs."""
        self._finalizer()

    def _take(self, caller: Caller) -> _Process:
        with self._lock:
            caller.check()  # a closed pool starts no process
            if self._idle:
                return self._idle.pop()
            process = _Process()
            self._all.add(process)
        return process

    def _put_back(self, process: _Process) -> None:
        with self._lock:
            if process.idle and not self._closed.is_set():
                self._idle.append(process)
                return
            self._all.discard(process)
        process.stop()
        process.release()


def _stop_all(
    idle: list[_Process], processes: set[_Process], lock: threading.Lock, closed: threading.Event
) -> None:
    """End every process. Busy ones are released by the threads that wait for them."""
    with lock:
        closed.set()
        resting = list(idle)
        idle.clear()
        found = list(processes)
        processes.clear()
    for process in found:
        process.stop()
    for process in resting:
        process.release()


class _Process:
    """One decoder process.

    Attributes:
        idle: whether it has finished its last job.
        is_new: whether it has not yet begun a job.
    """

    def __init__(self) -> None:
        self.idle = False
        self.is_new = True
        self._arena, self._arena_is_new = SharedArena(), True
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end, self._lifeline = os.pipe()
        self._link = ours
        try:
            self._popen = subprocess.Popen(
                [_interpreter(), "-m", _PROGRAM, str(theirs.fileno()), str(end)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(),
                pass_fds=(theirs.fileno(), end),
            )
        except OSError as error:
            ours.close()
            os.close(self._lifeline)
            self._arena.close()
            raise _cannot_start(str(error)) from error
        finally:
            theirs.close()
            os.close(end)

    def begin(self, job: MediaJob, data: bytes, caller: Caller) -> bool:
        """Send a job. Return False if the process has ended."""
        self.idle = False
        try:
            self._send_job(job, data)
        except OSError:
            caller.check()
            return False
        begun = bool(self._wait(time.monotonic() + _START_S, caller))
        self.is_new &= not begun
        return begun

    def parts(self, job: MediaJob, caller: Caller) -> Generator[MediaPart]:
        """Yield the parts of the job begun; see ``DecoderPool.run``."""
        deadline = None if job.timeout_s is None else time.monotonic() + job.timeout_s
        while (part := self._receive(job, deadline, caller)) is not None:
            if job.kind == "video" and part.array is not None:
                with contextlib.suppress(OSError):  # the next receive reports an ended process
                    self._send({})  # decode the next frame while this one is cut
            yield part
        if self._arena.num_bytes > _KEPT_BYTES:
            self._new_arena()

    def did_not_start(self) -> EnvironmentMissingError:
        """Return the error for a process that never began a job."""
        try:
            # the socket closes before the process has ended
            return _cannot_start(f"exit status {self._popen.wait(1)}")
        except subprocess.TimeoutExpired:
            return _cannot_start(f"not ready after {_START_S:g} s")

    def stop(self) -> None:
        """Kill the process and wait for its end."""
        self.idle = False
        self._popen.kill()
        self._popen.wait()

    def release(self) -> None:
        """Close the connection and the arena. Called once, by the last user."""
        self._link.close()
        self._arena.close()
        os.close(self._lifeline)

    def _new_arena(self) -> None:
        self._arena.close()
        self._arena, self._arena_is_new = SharedArena(), True

    def _send_job(self, job: MediaJob, data: bytes) -> None:
        self._arena.array([len(data)])[:] = np.frombuffer(data, dtype=np.uint8)
        descriptors = [self._arena.descriptor] if self._arena_is_new else []
        self._send({"job": job.to_dict(), "size": len(data)}, *descriptors)
        self._arena_is_new = False

    def _send(self, message: dict[str, Any], *descriptors: int) -> None:
        socket.send_fds(self._link, [json.dumps(message).encode()], descriptors)

    def _receive(self, job: MediaJob, deadline: float | None, caller: Caller) -> MediaPart | None:
        """Receive the next part; None at the end."""
        message = self._wait(deadline, caller)
        if message is None:
            raise UserError(
                f"{job.name}: not decoded within {job.timeout_s:g} s. Send a smaller or simpler "
                "one."
            )
        if not message:
            raise UserError(
                f"{job.name}: the process that decoded it ended. Save or download it again."
            )
        values = json.loads(message)
        self.idle = "done" in values or "error" in values
        if "error" in values:
            kind = UserError if values["error"] == "user" else EnvironmentMissingError
            raise kind(values["message"])
        if "done" in values:
            return None
        # copied: the next job overwrites this array
        return MediaPart(
            values["facts"],
            None if values["shape"] is None else self._arena.array(values["shape"]).copy(),
        )

    def _wait(self, deadline: float | None, caller: Caller) -> bytes | None:
        """Receive the next message: empty if the process has ended, None after the deadline.

        Raises:
            RequestCancelledError: the request was cancelled, and the grace time has passed.
        """
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        given_up: float | None = None
        while True:
            now = time.monotonic()
            if given_up is None and caller.cancelled():
                given_up = now + _GRACE_S
            if deadline is not None and now >= deadline:
                return None
            if given_up is not None and now >= given_up:
                raise RequestCancelledError("cancelled while its images and videos were decoded.")
            ends = [end - now for end in (deadline, given_up) if end is not None]
            if poll.poll(1000 * min([POLL_S, *ends])):
                message = b""
                with contextlib.suppress(ConnectionResetError):  # it ended with a message unread
                    message = self._link.recv(MAX_MESSAGE_BYTES)
                if not message:
                    caller.check()  # a closed pool ends its processes
                return message


def _cannot_start(reason: str) -> EnvironmentMissingError:
    return EnvironmentMissingError(
        f"decoding images: the process does not start ({reason}). See why: {_interpreter()} -m "
        f"{_PROGRAM} 0 0"
    )


def _environment() -> dict[str, str]:
    """Return the environment of decoder processes. They find the same packages as this process."""
    path = os.pathsep.join([PACKAGE_ROOT, *filter(None, sys.path)])
    return child_environment(**_SETTINGS, PYTHONPATH=path)
