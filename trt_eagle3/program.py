"""Run the program ``trt-eagle3``, and handle Ctrl-C from start to exit."""

from __future__ import annotations

import os
import signal

__all__ = ["main"]

_INTERRUPTED = 130  # the shell convention: 128 + SIGINT


def main() -> None:
    """Run the command line; Ctrl-C ends the process at any time.

    The imports take about a second, and the interpreter's exit may too. During both, SIGINT exits
    with
    status 130.
    """
    before = signal.signal(signal.SIGINT, _end)
    from trt_eagle3.cli import main as run

    signal.signal(signal.SIGINT, before)
    end = _end
    try:
        run()
    except SystemExit as ended:
        if ended.code == _INTERRUPTED:
            end = _end_silently
        raise
    finally:
        signal.signal(signal.SIGINT, end)


def _end(_signal: int, _frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(_INTERRUPTED)


def _end_silently(_signal: int, _frame: object) -> None:
    """Handle a second Ctrl-C: exit without a second message."""
    os._exit(_INTERRUPTED)
