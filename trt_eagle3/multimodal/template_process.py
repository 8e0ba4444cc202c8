"""The one process of this program that renders chat templates (``template_worker.py``): started,
asked, replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trt_eagle3.errors import EnvironmentMissingError, UserError, clip
from trt_eagle3.multimodal import template_worker

__all__ = ["render_template"]


def render_template(source: str, renders: Sequence[Mapping[str, Any]]) -> list[str]:
    """Render the template ``source`` once for each mapping of variables.

    Variables are JSON values; others are passed as their ``str``. Some 0.1 ms beside the rendering
    itself.

    Raises:
        UserError: it does not parse, refuses the variables, or takes more time or memory than a
            template may.
        EnvironmentMissingError: no process can be started.
    """
    request = json.dumps({"source": source, "renders": renders}, default=str).encode()
    answer = _PROCESS.ask(request)
    if answer is None:
        raise UserError(
            f"chat template: ended, as it took more than {template_worker.CPU_S:g} s or "
            f"{template_worker.MEMORY_BYTES >> 20} MiB. Copy it from the checkpoint again."
        )
    if "parse_error" in answer:
        raise UserError(
            f"chat template: does not parse ({clip(answer['parse_error'])}). Copy it from the "
            "checkpoint."
        )
    if "render_error" in answer:
        raise UserError(
            "messages: the checkpoint's chat template refuses them "
            f"({clip(answer['render_error'])})."
        )
    texts: list[str] = answer["texts"]
    return texts


class _Process:
    """The worker; it is started when first asked, and again after it was ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # pid: a fork of this program starts a worker of its own

    def ask(self, request: bytes) -> dict[str, Any] | None:
        """The worker's answer; None where the request was its end."""
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
        self._process, self._owner = _start(), os.getpid()
        return self._process

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                self._end()

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()
        self._process = None


def _start() -> subprocess.Popen[bytes]:
    # Inside Triton's stub, sys.executable may be the stub.
    python = Path(sys.prefix, "bin", "python3")
    command = [
        str(python if python.exists() else sys.executable),
        "-I",
        "-S",
        template_worker.__file__,
    ]
    try:
        return subprocess.Popen(
            [*command, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is its parent's
        )
    except OSError as error:
        raise EnvironmentMissingError(
            f"chat template: cannot start {command[0]}: {error.strerror}. Templates are rendered "
            "in a process."
        ) from error


_PROCESS = _Process()
atexit.register(_PROCESS.close)
