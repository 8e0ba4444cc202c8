"""The ways a run can end badly, each with its exit code; and how a message quotes what strangers
wrote.
"""

from __future__ import annotations

import reprlib
import traceback
from typing import Any

__all__ = [
    "MAX_MESSAGE_LEN",
    "MAX_QUOTE_LEN",
    "DeviceMemoryError",
    "EngineFailedError",
    "EnvironmentMissingError",
    "CheckFailedError",
    "OverloadedError",
    "RequestCancelledError",
    "TrtEagle3Error",
    "UserError",
    "as_failure",
    "clip",
    "is_failure",
    "quote",
    "release_frames",
]

MAX_QUOTE_LEN = 200
"""Characters of a foreign text that a message repeats at most."""
MAX_MESSAGE_LEN = 1200
"""Characters of a whole message at most."""
_TAIL_LEN = 300  # of its end, where the fix stands


def clip(text: object, most: int = MAX_QUOTE_LEN) -> str:
    """Cut ``str(text)`` to ``most`` characters of one printable line, without quotation marks.

    For names, and for the messages of other libraries. What cannot be printed (line ends, control
    characters, lone surrogates) is written as an escape.
    """
    whole = str(text)
    line = _printable(whole[: most + 1])
    return line if len(line) <= most else f"{line[: most - 3]}..."


def is_failure(error: BaseException) -> bool:
    """Whether ``error`` is a failure of the work, and not a request to exit.

    Panics of Rust libraries derive from BaseException only, so ``except Exception`` misses them.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def as_failure(error: BaseException) -> Exception:
    """``error`` as an Exception, to report the job that raised it."""
    if isinstance(error, Exception):
        return error
    failure = EngineFailedError(f"{type(error).__name__}: {clip(error)}")
    failure.__cause__ = error
    return failure


def release_frames(error: BaseException) -> None:
    """Release what the frames of ``error`` and of its causes hold, such as images of a request.

    Otherwise an error that is kept holds them until the garbage collector runs. A
    ``TrtEagle3Error`` and its causes lose their tracebacks; frames of other errors are emptied, and
    their tracebacks stay.
    """
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        if isinstance(error, TrtEagle3Error):
            following.__traceback__ = None
        else:
            traceback.clear_frames(following.__traceback__)
        following = following.__cause__ or following.__context__


def _printable(text: str) -> str:
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    )


def quote(value: object, most: int = MAX_QUOTE_LEN) -> str:
    """Write the ``repr`` of a value that somebody else wrote, cut to ``most`` characters.

    The cost is bounded too: of long texts, lists and numbers, only as much is formatted as is
    shown.
    """
    return clip(_Quote(most).repr(value), most)


class _Quote(reprlib.Repr):
    """``repr`` whose every part is bounded."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.maxstring = self.maxother = most
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 16
        self.maxlevel = 4

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write numbers of more than 4,300 digits."""
        return (
            super().repr_int(x, level)
            if x.bit_length() < 4096
            else f"a number of {x.bit_length()} bits"
        )

    def repr_bytes(self, x: bytes, level: int) -> str:
        """Only as many bytes as are shown."""
        del level
        return repr(x[: self.maxstring])


class TrtEagle3Error(Exception):
    """Base of every error that the command line prints as one line, without a traceback."""

    exit_code = 1


class CheckFailedError(TrtEagle3Error):
    """A check that the user asked for did not hold."""

    exit_code = 1


class UserError(TrtEagle3Error, ValueError):
    """The user's input is wrong: names the thing, what was expected, what was got, and the fix.

    A message is one printable line of bounded length, whatever it quotes, so that it can be sent
    and shown; but quote foreign texts with ``quote`` and ``clip`` all the same.
    """

    exit_code = 2

    def __init__(self, message: str, *rest: Any) -> None:
        if len(message) > MAX_MESSAGE_LEN:
            message = f"{message[: MAX_MESSAGE_LEN - _TAIL_LEN]} ... {message[-_TAIL_LEN:]}"
        super().__init__(_printable(message), *rest)


class EngineFailedError(TrtEagle3Error):
    """An engine computed what cannot be right, or has ended."""

    exit_code = 1


class DeviceMemoryError(TrtEagle3Error):
    """One request asked for more of the device's memory than is free; others go on."""

    exit_code = 1


class OverloadedError(TrtEagle3Error):
    """More is asked of an engine than it may queue; the same request may be welcome a little
    later.
    """

    exit_code = 1


class ClosedError(OverloadedError):
    """An engine was closed: it takes no more requests, and never will again."""

    exit_code = 1


class RequestCancelledError(TrtEagle3Error):
    """Nobody waits for the answer any more: the client has left, or the request's time is over."""

    exit_code = 1


class EnvironmentMissingError(TrtEagle3Error):
    """This machine lacks something that the command needs; the message says how to get it."""

    exit_code = 3
