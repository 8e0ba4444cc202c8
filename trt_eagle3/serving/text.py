"""What leaves the program as a message: always text that can be sent, whatever a client wrote."""

from __future__ import annotations

__all__ = ["sendable"]

_MAX_MESSAGE = 2000  # characters


def sendable(message: object) -> str:
    """``message`` as text that every encoding and every C string can carry, cut to a length that a client reads.

    Lone surrogates and control characters (NUL, ends of lines) are written as escapes.
    """
    text = str(message)[:_MAX_MESSAGE]
    encoded = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in encoded)
