"""Emission: what one step of the scheduler did for one sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from trt_eagle3.decode.sequence import SequenceState

__all__ = ["Emission", "joined"]


@dataclass(frozen=True)
class Emission:
    """What a step did for one sequence.

    Attributes:
        tokens: newly emitted ones, those of a cycle behind the first token.
        begins: whether the first of ``tokens`` is the sequence's first, from its prompt's last row.
        full: it has as many tokens as a sequence can have.
        steps: the deepest level of the tree that was verified; 0 where it decoded without a draft,
            None where it was in no cycle.
        error: why it cannot go on; it is out of the scheduler then.
    """

    sequence: SequenceState
    tokens: tuple[int, ...]
    begins: bool = False
    full: bool = False
    steps: int | None = None
    error: Exception | None = None

    @property
    def parts(self) -> list[Emission]:
        """What each forward emitted by itself: the prompt's, the cycle's."""
        if not self.begins:
            return [self] if self.tokens else []
        first = replace(self, tokens=self.tokens[:1], full=self.full and not self.tokens[1:])
        cycle = replace(self, tokens=self.tokens[1:], begins=False)
        return [replace(first, steps=None), *cycle.parts]


def joined(emissions: Iterable[Emission]) -> list[Emission]:
    """One emission of every sequence, in the order of its first: a cycle's tokens follow the first
    token that was read in the same step.
    """
    found: dict[int, Emission] = {}
    for later in emissions:
        earlier = found.get(id(later.sequence))
        if earlier is not None:
            tokens = earlier.tokens + later.tokens
            later = replace(later, tokens=tokens, begins=earlier.begins)
        found[id(later.sequence)] = later
    return list(found.values())
