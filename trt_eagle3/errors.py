"""Define the errors of a run with their exit codes, and quote untrusted text in messages."""

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
    "RankFailedError",
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
"""Maximum characters of an untrusted text that a message repeats."""
MAX_MESSAGE_LEN = 1200
"""Maximum characters of a whole message."""
_TAIL_LEN = 300  # characters kept from the end of a long message, which holds the fix


def clip(text: object, most: int = MAX_QUOTE_LEN) -> str:
    """Cut ``str(text)`` to ``most`` characters of one printable line, without quotation marks.

    For names, and for messages of other libraries. Unprintable characters (line ends, control
    characters, lone surrogates) are escaped.
    """
    whole = str(text)
    line = _printable(whole[: most + 1])
    return line if len(line) <= most else f"{line[: most - 3]}..."


def is_failure(error: BaseException) -> bool:
    """Return whether ``error`` is a failure of the work, not a request to exit or the engine's end.

    Panics of Rust libraries derive from BaseException only, so ``except Exception`` misses them.
    """
    if isinstance(error, RankFailedError):
        return False
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def as_failure(error: BaseException) -> Exception:
    """Return ``error`` as an Exception, to report the job that raised it."""
    if isinstance(error, Exception):
        return error
    failure = EngineFailedError(f"{type(error).__name__}: {clip(error)}")
    failure.__cause__ = error
    return failure


def release_frames(error: BaseException) -> None:
    """Release what the frames of ``error`` and of its causes hold, such as images of a request.

    Otherwise a stored error keeps them alive until the garbage collector runs. A ``TrtEagle3Error``
    and
    its causes lose their tracebacks. Other errors keep their tracebacks; their frames are cleared.
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
    """Return the ``repr`` of an untrusted value, cut to ``most`` characters.

    The cost is bounded too: only the part shown of long texts, lists and numbers is formatted.
    """
    return clip(_Quote(most).repr(value), most)


class _Quote(reprlib.Repr):
    """``repr`` with a bound on every part."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.maxstring = self.maxother = most
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 16
        self.maxlevel = 4

    def repr_int(self, x: int, level: int) -> str:
        """Describe an integer that is too long to print: Python refuses over 4,300 digits."""
        return (
            super().repr_int(x, level)
            if x.bit_length() < 4096
            else f"a number of {x.bit_length()} bits"
        )

    def repr_bytes(self, x: bytes, level: int) -> str:
        """Format only the bytes that are shown."""
        del level
        return repr(x[: self.maxstring])


class TrtEagle3Error(Exception):
    """Base of every error that the command line prints as one line, without a traceback."""

    exit_code = 1


class CheckFailedError(TrtEagle3Error):
    """A check that the user requested failed."""

    exit_code = 1


class UserError(TrtEagle3Error, ValueError):
    """The user's input is wrong; the message gives expected and actual values, and the fix.

    The message becomes one printable line of bounded length, whatever it quotes, so it can be sent
    and
    shown. Quote untrusted texts with ``quote`` and ``clip`` all the same.
    """

    exit_code = 2

    def __init__(self, message: str, *rest: Any) -> None:
        if len(message) > MAX_MESSAGE_LEN:
            message = f"{message[: MAX_MESSAGE_LEN - _TAIL_LEN]} ... {message[-_TAIL_LEN:]}"
        super().__init__(_printable(message), *rest)


class EngineFailedError(TrtEagle3Error):
    """An engine computed an impossible result, or has ended."""

    exit_code = 1


class RankFailedError(EngineFailedError):
    """A rank of a tensor-parallel engine has failed, so the whole engine ends."""

    exit_code = 1


class DeviceMemoryError(TrtEagle3Error):
    """One request needs more device memory than is free; other requests continue."""

    exit_code = 1


class OverloadedError(TrtEagle3Error):
    """The engine's queue is full; the same request may succeed a little later."""

    exit_code = 1


class ClosedError(OverloadedError):
    """The engine is closed and accepts no more requests."""

    exit_code = 1


class RequestCancelledError(TrtEagle3Error):
    """The request was cancelled: the client disconnected, or the request's time ran out."""

    exit_code = 1


class EnvironmentMissingError(TrtEagle3Error):
    """This machine lacks something that the command needs; the message names the remedy."""

    exit_code = 3
