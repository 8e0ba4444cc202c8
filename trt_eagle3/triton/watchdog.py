"""Stop the server if the backend process dies without a clean exit.

Triton 2.51 still reports a model as ready after its Python process has crashed, and answers every
request with an error. Readiness probes, clients and supervisors notice a stopped server, and
supervisors restart it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from trt_eagle3.io.child_environment import child_environment

__all__ = ["Watchdog"]

GRACE_S = 5  # time for other models of the server to finish

# Waits for the end of the backend process's pipe. A byte before the end means a clean exit.
_PROGRAM = """
import os, signal, sys, time
server, grace, regions = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
def born():
    try:
        with open(f"/proc/{server}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[19]
    except OSError:
        return None
since = born()
if not sys.stdin.buffer.read(1):
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if since is not None and born() == since:  # its number may be another process's by now
            os.kill(server, signum)
            for _ in range(int(10 * grace)):
                if born() == since:
                    time.sleep(0.1)
    for region in regions:
        try:
            os.unlink("/dev/shm/" + region)
        except FileNotFoundError:
            pass
"""


class Watchdog:
    """Guards the process that makes it; the server is that process's parent."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [
                _interpreter(),
                "-I",
                "-S",
                "-c",
                _PROGRAM,
                str(os.getppid()),
                str(GRACE_S),
                *_regions(),
            ],
            stdin=subprocess.PIPE,
            env=child_environment(),
            start_new_session=True,
            close_fds=True,
        )

    def dismiss(self) -> None:
        """Report a clean exit of this process."""
        self._process.communicate(b"x", timeout=5)


def _regions() -> list[str]:
    """Return the names of this process's shared memory: a killed server leaves it behind."""
    words = Path("/proc/self/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    return [word for word in words if word.startswith("triton_python_backend_shm_region_")]


def _interpreter() -> str:
    """Return the Python interpreter; in Triton's stub, ``sys.executable`` may be the stub."""
    return f"{sys.prefix}/bin/python3"
