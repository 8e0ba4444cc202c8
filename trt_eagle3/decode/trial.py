"""Trial: a few cycles of another width, to see what it is worth."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TRIAL_CYCLES", "Trial"]

TRIAL_CYCLES = 4
"""Of a trial; the first is not timed: the draft catches up in it."""


@dataclass
class Trial:
    """Cycles of another width.

    Attributes:
        rate: speed of what is served without them, times that of plain decoding.
        quiet: whether prompts wait until it is over.
        left: cycles of it that are wanted. patience: cycles until it is given up: near the length
            limit nobody drafts, and a plain pass that runs already comes first.
    """

    candidate: int
    rate: float
    quiet: bool
    left: int = TRIAL_CYCLES
    patience: int = 2 * TRIAL_CYCLES

    def count(self, candidate: int) -> bool:
        """Count a cycle of ``candidate``; whether the trial is over."""
        self.left -= candidate == self.candidate
        self.patience -= 1
        return min(self.left, self.patience) == 0
