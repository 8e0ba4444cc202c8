"""Trial: a few cycles of another width, to see what it is worth."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TRIAL_CYCLES", "Trial"]

TRIAL_CYCLES = 4
"""Of a trial; the first is not timed: the draft catches up in it."""


@dataclass
class Trial:
    """Cycles of another width, and the tokens per second without them.

    Attributes:
        left: cycles of it that are wanted. patience: cycles until it is given up: near the length
            limit nobody drafts, and a plain pass that runs already comes first.
    """

    candidate: int
    rate: float
    left: int = TRIAL_CYCLES
    patience: int = 2 * TRIAL_CYCLES

    def count(self, candidate: int) -> bool:
        """Count a cycle of ``candidate``; whether the trial is over."""
        self.left -= candidate == self.candidate
        self.patience -= 1
        return min(self.left, self.patience) == 0
