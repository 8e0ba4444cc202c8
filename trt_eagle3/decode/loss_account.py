"""LossAccount: how much time speculation may still lose against plain decoding."""

from __future__ import annotations

__all__ = ["LossAccount"]

_SHARE = 0.005  # of the time of plain cycles
_FIRST = 1.0  # plain cycles, before any time has gone by
_MOST = 2.0  # plain cycles: what was won long ago does not pay for losing now


class LossAccount:
    """Seconds that may be lost: plain cycles earn a share of their time, every other cycle the time
    that plain decoding would have taken for its tokens, less its own.

    So what is served falls behind plain decoding by that share and a few cycles at most, however
    wrong the guesses are that a tree is chosen by.
    """

    def __init__(self) -> None:
        self._balance: float | None = None

    def balance(self, plain_seconds: float) -> float:
        """Seconds that may be lost now, never less than 0; ``plain_seconds``: of a plain cycle."""
        return max(self._known(plain_seconds), 0.0)

    def earn(self, seconds: float, plain_seconds: float) -> None:
        """Count ``seconds`` of plain decoding."""
        self._add(_SHARE * seconds, plain_seconds)

    def settle(self, spent: float, worth: float, plain_seconds: float) -> None:
        """Count a cycle that took ``spent`` seconds for what is worth ``worth`` seconds."""
        self._add(worth - spent, plain_seconds)

    def _add(self, seconds: float, plain_seconds: float) -> None:
        most = _MOST * plain_seconds
        self._balance = max(min(self._known(plain_seconds) + seconds, most), -most)

    def _known(self, plain_seconds: float) -> float:
        """The balance, or what it begins with."""
        return _FIRST * plain_seconds if self._balance is None else self._balance
