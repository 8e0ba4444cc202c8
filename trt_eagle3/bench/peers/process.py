"""The benchmark's handle of a peer: a process that opens a job and runs rounds."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import trt_eagle3
from trt_eagle3.bench.peers import START_S
from trt_eagle3.bench.peers.protocol import (
    PeerJob,
    PeerPrompt,
    PeerReply,
    PeerRound,
    from_line,
    reply_of,
    to_line,
)
from trt_eagle3.bench.workload import Run, TimedReply
from trt_eagle3.errors import EnvironmentMissingError, TrtEagle3Error, UserError, clip

__all__ = ["PeerProcess"]

_ROUND_S = 1800.0


class PeerProcess:
    """A peer in its own process group, which ends with this object; a context manager."""

    def __init__(
        self, name: str, job: PeerJob, python: Path | None = None, log: Path | None = None
    ) -> None:
        """Start peer ``name`` on ``job``, in the environment of ``python``, by default this one.

        Returns before the peer is ready, so that several can start at once (``wait``).

        Args:
            log: file for its stderr.

        Raises:
            UserError: ``python`` cannot be run, or ``log`` cannot be written.
        """
        self.name = name
        self._log = _nameless_file() if log is None else _log_file(log)
        self._process = _launch(name, python, self._log)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._send(to_line(job))

    def wait(self, seconds: float = START_S) -> str:
        """Wait until the peer is ready; return its version.

        Raises:
            EnvironmentMissingError: the peer is not installed there, or too old.
            UserError: it cannot open the job, or is not ready within ``seconds``.
        """
        version: str = self._receive(seconds)["version"]
        return version

    def run(
        self,
        prompts: Sequence[PeerPrompt],
        *,
        max_tokens: int,
        ignore_eos: bool = False,
        concurrency: int = 1,
    ) -> Run:
        """Answer ``prompts``, with ``concurrency`` of them in flight.

        Raises:
            UserError: the peer cannot process a prompt, or its process has ended.
        """
        asked = PeerRound(tuple(prompts), max_tokens, ignore_eos, concurrency)
        self._send(to_line(asked))
        found = self._receive(_ROUND_S)
        return _run_of([reply_of(reply) for reply in found["replies"]], found["seconds"])

    def close(self) -> None:
        """End the process and all its children."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> None:
        """Queue the lines of the process, and an empty one at its end."""
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):  # closed
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put("")

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ``_receive`` reports the last line of stderr
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _receive(self, seconds: float) -> Mapping[str, Any]:
        try:
            answer = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise UserError(
                f"{self.name}: no answer within {seconds:g} s. {self._last_line()}"
            ) from None
        if not answer:
            raise UserError(f"{self.name}: its process has ended. {self._last_line()}")
        found = from_line(answer)
        if "error" in found:
            kind: type[TrtEagle3Error] = EnvironmentMissingError if found["missing"] else UserError
            message = clip(found["error"], 600)
            raise kind(message if message.startswith(self.name) else f"{self.name}: {message}")
        return found

    def _last_line(self) -> str:
        """Quote the last line of its stderr."""
        self._log.seek(max(self._log.seek(0, os.SEEK_END) - 4096, 0))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"Its last line: {clip(lines[-1], 400)}" if lines else "It printed nothing."


def _log_file(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w+b")
    except OSError as error:
        raise UserError(
            f"--peer-log {path.parent}: cannot write there: {error.strerror}"
        ) from error


def _nameless_file() -> BinaryIO:
    descriptor, path = tempfile.mkstemp()
    Path(path).unlink()
    return os.fdopen(descriptor, "w+b")


def _launch(name: str, python: Path | None, log: BinaryIO) -> subprocess.Popen[str]:
    """Run the driver; ``-P`` prevents imports from the working folder."""
    home = str(Path(trt_eagle3.__file__).parent.parent)
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [str(python or sys.executable), "-P", "-m", "trt_eagle3.bench.peers.driver", name]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
    except OSError as error:
        raise UserError(
            f"--peer-python {python}: cannot be run: {error.strerror}. Give the Python of the "
            f"environment that has {name}."
        ) from error


def _run_of(replies: Sequence[PeerReply], seconds: float) -> Run:
    """Convert replies to ours; every step after the first token counts as a drafting cycle."""
    depths = Counter(count - 1 for reply in replies for _, count in reply.passes)
    deepest = max(depths, default=0)
    accepted = tuple(sum(depths[d] for d in depths if d >= at) for at in range(1, deepest + 1))
    return Run(
        tuple(TimedReply(r.token_ids, r.first_token_seconds, r.passes) for r in replies),
        seconds,
        depths.total(),
        accepted,
    )
