"""The process of a peer: ``python -m trt_eagle3.bench.peers.driver NAME`` (see ``protocol``)."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO

from trt_eagle3.bench.peers import PEERS
from trt_eagle3.bench.peers.protocol import (
    Peer,
    PeerError,
    PeerJob,
    from_line,
    round_of,
    to_line,
)

__all__ = ["check_version", "main"]


def main() -> None:
    """Open the peer named on the command line, and run rounds until the input ends."""
    name = sys.argv[1]
    answers = _own_stdout()
    job = PeerJob(**from_line(sys.stdin.readline()))
    peer = _answer(answers, lambda: _open(name, job))
    if peer is not None:
        for line in sys.stdin:
            _answer(answers, partial(_run, peer, line))


def check_version(package: str, least: tuple[int, ...], install: str) -> str:
    """Return the version of ``package`` that is installed here.

    Raises:
        PeerError: it is not installed, or older than ``least``.
    """
    wanted = ".".join(map(str, least))
    try:
        found = version(package)
    except PackageNotFoundError as error:
        raise PeerError(
            f"{package}: not installed for {sys.executable}. Run: pip install '{install}'",
            missing=True,
        ) from error
    numbers = tuple(int(part) for part in found.split(".")[: len(least)] if part.isdigit())
    if numbers < least:
        raise PeerError(
            f"{package}: expected {wanted} or later for {sys.executable}, got {found}. "
            f"Run: pip install '{install}'",
            missing=True,
        )
    return found


def _own_stdout() -> TextIO:
    """Return the pipe for answers, and redirect stdout to stderr, so that prints go there."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def _open(name: str, job: PeerJob) -> tuple[Peer, dict[str, Any]]:
    peer: Peer = import_module(PEERS[name]).start(job)
    return peer, {"version": peer.version}


def _run(peer: Peer, line: str) -> tuple[Peer, dict[str, Any]]:
    asked = round_of(from_line(line))
    start = time.perf_counter()
    replies = peer.run(asked)
    seconds = time.perf_counter() - start
    return peer, {"seconds": seconds, "replies": [asdict(reply) for reply in replies]}


def _answer(answers: TextIO, work: Callable[[], tuple[Peer, dict[str, Any]]]) -> Peer | None:
    """Do ``work`` and write its result; return None if it failed."""
    try:
        peer, found = work()
    except Exception as error:
        if not isinstance(error, PeerError):
            traceback.print_exc()
        message = str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
        missing = isinstance(error, PeerError) and error.missing
        answers.write(to_line({"error": message, "missing": missing}))
        return None
    answers.write(to_line(found))
    return peer


if __name__ == "__main__":
    main()
