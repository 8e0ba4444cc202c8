"""A process that runs what strangers wrote: started when it is first asked, replaced when a request
was its end.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trt_eagle3.errors import EnvironmentMissingError
from trt_eagle3.io.child_environment import child_environment

__all__ = ["WorkerProcess"]


class WorkerProcess:
    """One worker: a script that reads a line of JSON and writes a line of JSON, again and again."""

    def __init__(self, script: str, what: str, preface: Callable[[], bytes] = bytes) -> None:
        """``script``: its file; ``sys.argv[1]`` is this program's ``sys.path`` as JSON. ``what`` it
        works on, for errors. ``preface``: a line that it reads first; empty: none.
        """
        self._script, self._what, self._preface = script, what, preface
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # pid: a fork of this program starts a worker of its own
        atexit.register(self.close)

    def ask(self, request: bytes) -> dict[str, Any] | None:
        """The worker's answer; None where the request was its end.

        Raises:
            EnvironmentMissingError: no process can be started.
        """
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            line = b""
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(request + b"\n")
                process.stdin.flush()
                line = process.stdout.readline()
            if line.endswith(b"\n"):
                answer: dict[str, Any] = json.loads(line)
                return answer
            self._end()
            return None

    def _running(self) -> subprocess.Popen[bytes]:
        if (
            self._process is not None
            and self._owner == os.getpid()
            and self._process.poll() is None
        ):
            return self._process
        self._process, self._owner = self._start(), os.getpid()
        return self._process

    def close(self) -> None:
        """End the worker; asked again, another one starts."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                self._end()

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        # Inside Triton's stub, sys.executable may be the stub.
        python = Path(sys.prefix, "bin", "python3")
        command = [str(python if python.exists() else sys.executable), "-I", "-S", self._script]
        try:
            process = subprocess.Popen(
                [*command, json.dumps(sys.path)],
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
        if (line := self._preface()) and process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line + b"\n")
        return process
