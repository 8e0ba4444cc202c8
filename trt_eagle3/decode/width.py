"""The widths that a plan chooses from, and the batch that it chooses for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from trt_eagle3.decode.acceptance_rate import Level
from trt_eagle3.decode.cycle_cost import Shape
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.decode.tree import AnyTree

__all__ = ["DecodingBatch", "Width"]


@dataclass(frozen=True)
class DecodingBatch:
    """Sequences that decode together."""

    sequences: Sequence[SequenceState]

    @property
    def size(self) -> int:
        """B."""
        return len(self.sequences)

    @cached_property
    def context(self) -> float:
        """Their mean length."""
        return sum(s.length for s in self.sequences) / max(self.size, 1)

    @cached_property
    def drafting(self) -> list[SequenceState]:
        """Those that a draft follows."""
        return [s for s in self.sequences if s.drafting]

    @cached_property
    def deferred(self) -> int:
        """Rows that the draft lacks of them."""
        return sum(len(s.deferred) for s in self.sequences)


@dataclass(frozen=True)
class Width:
    """A tree that may be drafted, or none, and its levels."""

    tree: AnyTree | None
    levels: tuple[Level, ...]

    @property
    def num_nodes(self) -> int:
        """The root included."""
        return self.tree.num_nodes if self.tree else 1

    @property
    def steps(self) -> int:
        """Levels."""
        return len(self.levels)

    def shape(self, batch: DecodingBatch) -> Shape:
        """What the time of a cycle over ``batch`` depends on."""
        return Shape(self.num_nodes, self.steps, batch.size, batch.context)
