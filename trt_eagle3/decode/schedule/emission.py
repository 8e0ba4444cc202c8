"""Emission: what one step of the scheduler did for one sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from trt_eagle3.decode.memory.sequence import SequenceState

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
        """An emission for each forward that emitted tokens: the prompt's, then the cycle's."""
        if not self.begins:
            return [self] if self.tokens else []
        first, rest = self.tokens[:1], self.tokens[1:]
        cycle = replace(self, tokens=rest, begins=False)
        return [
            replace(self, tokens=first, full=self.full and not rest, steps=None),
            *cycle.parts,
        ]


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
