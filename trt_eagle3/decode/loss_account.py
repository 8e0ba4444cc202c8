"""LossAccount: how much time may still be lost against what would have been served otherwise."""

from __future__ import annotations

__all__ = ["LossAccount"]


class LossAccount:
    """Seconds that may be lost, by an allowance of a share of all the time that goes by.

    Every cycle is settled: what its tokens are worth, in seconds of the other way of serving them,
    less the time that it took, plus the share of that time. As long as nobody begins what the
    balance does not bear, the worth never falls below ``1 - share`` of the time, however wrong the
    guesses are by which a tree is chosen.

    Before any time has gone by an ``advance`` may be lost: the first shares repay it, so that the
    bound holds from the time on of which the advance is that share.
    """

    def __init__(self, share: float, advance: float, most: float) -> None:
        """Begin with nothing settled.

        Args:
            share: of the time that goes by.
            advance: in cycles of the other way.
            most: cycles that may be lost at once; what was won or not lost long ago does not pay
                for more than that.
        """
        self._share = share
        self._advance = advance
        self._most = most
        self._balance: float | None = None
        self._owed = 0.0  # of the advance

    def balance(self, cycle_seconds: float) -> float:
        """Seconds that may be lost now, never less than 0; ``cycle_seconds``: of a cycle of the
        other way.
        """
        if self._balance is None:
            return self._advance * cycle_seconds
        return max(self._balance, 0.0)

    def settle(self, spent: float, worth: float, cycle_seconds: float) -> None:
        """Count a cycle that took ``spent`` seconds for what is worth ``worth`` seconds."""
        if self._balance is None:
            self._balance = self._owed = self._advance * cycle_seconds
        earned = self._share * spent
        repaid = min(earned, self._owed)
        self._owed -= repaid
        balance = self._balance + worth - spent + earned - repaid
        most = self._most * cycle_seconds
        self._balance = max(min(balance, most), -most)
