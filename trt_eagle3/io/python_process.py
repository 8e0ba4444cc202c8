"""Start a Python process that talks to this one over a connection."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from trt_eagle3.errors import EnvironmentMissingError
from trt_eagle3.io.child_environment import child_environment

__all__ = ["interpreter", "start_python"]

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from {module} import main; main(int(sys.argv[1]))"
)


def interpreter() -> str:
    """Return the Python interpreter. Inside Triton's stub, ``sys.executable`` may be the stub."""
    executable = sys.executable or ""
    return executable if Path(executable).name.startswith("python") else f"{sys.prefix}/bin/python3"


def start_python(module: str, descriptor: int, what: str) -> subprocess.Popen[bytes]:
    """Start ``module.main(descriptor)`` in another process.

    The process gets no signals of the terminal, and none of this process's secrets.

    Args:
        descriptor: the process's end of the connection. what: the process, for the message.
    Raises:
        EnvironmentMissingError: no process can be started.
    """
    words = [_PROGRAM.format(module=module), str(descriptor), json.dumps(sys.path)]
    try:
        return subprocess.Popen(
            # -P: ignores a json.py in the working directory. -u: unbuffered, so a crash loses no
            # output.
            [interpreter(), "-P", "-u", "-c", *words],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            env=child_environment(),
            start_new_session=True,  # the parent alone handles Ctrl-C
        )
    except OSError as error:
        raise EnvironmentMissingError(
            f"{what}: cannot start its process {interpreter()}: {error.strerror}."
        ) from error
