"""Emission: the result of one scheduler step for one sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from trt_eagle3.decode.memory.sequence import SequenceState

__all__ = ["Emission", "joined"]


@dataclass(frozen=True)
class Emission:
    """The result of a step for one sequence.

    Attributes:
        tokens: newly emitted tokens: the first token, then those of the cycle.
        begins: whether ``tokens`` starts with the sequence's first token, from its prompt's last
            row.
        full: whether the sequence has the most tokens that a sequence can have.
        tree_depth: the deepest level of the verified tree; 0 without a draft, None without a cycle.
        error: why the sequence failed; it has left the scheduler. None: it did not fail.
    """

    sequence: SequenceState
    tokens: tuple[int, ...]
    begins: bool = False
    full: bool = False
    tree_depth: int | None = None
    error: Exception | None = None

    @property
    def parts(self) -> list[Emission]:
        """One emission per forward that emitted tokens: the prompt's, then the cycle's."""
        if not self.begins:
            return [self] if self.tokens else []
        first, rest = self.tokens[:1], self.tokens[1:]
        cycle = replace(self, tokens=rest, begins=False)
        return [
            replace(self, tokens=first, full=self.full and not rest, tree_depth=None),
            *cycle.parts,
        ]


def joined(emissions: Iterable[Emission]) -> list[Emission]:
    """Merge the emissions of each sequence, in the order in which each sequence first appears.

    A first token comes before the cycle's tokens of the same step.
    """
    found: dict[int, Emission] = {}
    for later in emissions:
        earlier = found.get(id(later.sequence))
        if earlier is not None:
            tokens = earlier.tokens + later.tokens
            later = replace(later, tokens=tokens, begins=earlier.begins)
        found[id(later.sequence)] = later
    return list(found.values())
