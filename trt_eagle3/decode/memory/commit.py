"""What of a forward's new rows stays in a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trt_eagle3.decode.memory.sequence import SequenceState

__all__ = ["Commit"]


@dataclass(frozen=True)
class Commit:
    """Which new rows of a forward stay in a sequence.

    Attributes:
        start: rows of the sequence before the forward.
        path: the new rows that stay, ascending: the first row and descendants of it. Row
            ``path[i]`` of the forward becomes row ``start + i`` of the sequence.
    """

    sequence: SequenceState
    start: int
    path: Sequence[int]

    @property
    def in_place(self) -> bool:
        """Whether the rows stand where they belong already."""
        return not self.path or self.path[-1] == len(self.path) - 1
