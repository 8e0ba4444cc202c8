"""The program ``trt-eagle3``: the command line, and Ctrl-C from its first moment to its last."""

from __future__ import annotations

import os
import signal

__all__ = ["main"]

_INTERRUPTED = 130  # as shells have it


def main() -> None:
    """Run the command line. Importing it takes a second, and so may the end of the interpreter: in
    both Ctrl-C ends the process.
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
    """Ctrl-C for the second time: it was said."""
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
