"""Plans: which tree is drafted next, by the number of sequences that decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.decoder import AnyTree
from trt_eagle3.decode.dynamic_tree import DynamicTree
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.decode.tree import Tree, best_first, configured_tree, static_tree
from trt_eagle3.decode.tuning import TuningTable, read_table

__all__ = ["Cycle", "Plan", "TreePlan", "plan_of", "read_plan", "shrunk", "widths"]


@dataclass(frozen=True)
class Cycle:
    """A cycle that is over.

    Attributes:
        tree: that was drafted; None of plain decoding.
        accepted: by sequence, how many levels of its tree were accepted; None of one that decoded
            plainly.
        caught_up: rows that the draft had to catch up with first, of all sequences together.
        seconds: since the end of the cycle before; None where anything else came between.
        joining: sequences that decode as soon as their prompts are through, which run beside this
            cycle, or wait for it to be timed; 0 where plain steps do not run in their forwards.
        following: seconds that the host took to launch the draft over prompts beside this cycle; 0
            where it follows none of them.
    """

    sequences: Sequence[SequenceState]
    tree: AnyTree | None
    accepted: Sequence[int | None]
    caught_up: int = 0
    seconds: float | None = None
    joining: int = 0
    following: float = 0.0

    @property
    def num_tokens(self) -> int:
        """That all sequences emitted."""
        return sum((accepted or 0) + 1 for accepted in self.accepted)

    @property
    def plain_steps(self) -> float:
        """Plain cycles of the same sequences that emit as much."""
        return self.num_tokens / len(self.sequences) if self.sequences else 1.0

    @property
    def is_quiet(self) -> bool:
        """Whether prompts waited for it."""
        return self.joining > 0 and self.seconds is not None


class TreePlan(Protocol):
    """Chooses the tree of every cycle."""

    @property
    def speculates(self) -> bool:
        """Whether it ever drafts."""
        ...

    @property
    def wants_quiet(self) -> bool:
        """Whether the next cycle is to be timed: prompts wait for it."""
        ...

    def tree_for(self, sequences: Sequence[SequenceState]) -> AnyTree | None:
        """The tree for ``sequences`` that decode together; None is plain decoding."""
        ...

    def follows(self, sequence: SequenceState, others: Sequence[SequenceState]) -> bool:
        """Whether the draft is to follow ``sequence``, which begins beside ``others``: it then
        runs over the prompt, too.
        """
        ...

    def trees_at(self, batch_size: int) -> Sequence[AnyTree | None]:
        """All that it may choose for so many sequences, the likeliest first: what to prepare."""
        ...

    def prime(self, tree: AnyTree | None, batch_size: int, seconds: float) -> None:
        """Hear what a cycle of ``tree`` takes over short contexts, before anything is served."""
        ...

    def prime_catch_up(self, num_rows: int, seconds: float) -> None:
        """Hear how long the draft takes to catch up with ``num_rows`` rows of all sequences
        together, before anything is served.
        """
        ...

    def observe(self, cycle: Cycle) -> None:
        """Hear of a cycle."""
        ...


class Plan:
    """A fixed tree for each batch size; between measured sizes that of the next larger one
    counts.
    """

    wants_quiet = False

    def __init__(self, trees: Mapping[int, AnyTree | None]) -> None:
        """``trees``: by batch size, at least one; None is plain decoding."""
        self._trees = sorted(trees.items(), key=lambda item: item[0])

    @property
    def speculates(self) -> bool:
        """Whether it ever does."""
        return any(tree is not None for _, tree in self._trees)

    def tree_at(self, batch_size: int) -> AnyTree | None:
        """The tree for so many sequences; None is plain decoding."""
        return next((tree for size, tree in self._trees if size >= batch_size), self._trees[-1][1])

    def tree_for(self, sequences: Sequence[SequenceState]) -> AnyTree | None:
        """By their number alone."""
        return self.tree_at(len(sequences))

    def follows(self, *_: object) -> bool:
        """Always: whoever is served plainly now may be among fewer soon."""
        return True

    def trees_at(self, batch_size: int) -> Sequence[AnyTree | None]:
        """Its tree, and what a sequence near the length limit has."""
        tree = self.tree_at(batch_size)
        return (None,) if tree is None else (tree, None)

    def prime(self, tree: AnyTree | None, batch_size: int, seconds: float) -> None:
        """Learn nothing."""

    def prime_catch_up(self, num_rows: int, seconds: float) -> None:
        """Learn nothing."""

    def observe(self, cycle: Cycle) -> None:
        """Learn nothing."""


def plan_of(table: TuningTable) -> Plan:
    """The plan of a table: at every batch size as many tokens as paid best."""
    return Plan(
        {e.batch_size: shrunk(table.speculation, e.num_draft_tokens) for e in table.entries}
    )


def shrunk(config: SpeculationConfig, num_draft_tokens: int) -> AnyTree | None:
    """The configured tree cut to ``num_draft_tokens`` nodes: a shorter chain, or the likeliest
    nodes; None of 1.
    """
    if num_draft_tokens == 1:
        return None
    if config.mode == "dynamic":
        return DynamicTree(min(config.steps, num_draft_tokens - 1), config.topk, num_draft_tokens)
    whole = static_tree(config)
    return Tree.from_paths(best_first(whole.paths)[: num_draft_tokens - 1])


def widths(most: int) -> list[int]:
    """Tree sizes to choose from: 1 is plain decoding, then in steps of about 1.4 up to the
    configured one.
    """
    steps = {1, most}
    width = 2
    while width < most:
        steps |= {width, width * 3 // 2}
        width *= 2
    return sorted(n for n in steps if n <= most)


def read_plan(bundle: Path, config: SpeculationConfig, device: str) -> Plan:
    """The fixed plan of a bundle: that of its table, or without one the configured tree, always.

    Raises:
        UserError: as for ``read_table``.
    """
    tree = configured_tree(config)
    table = read_table(bundle, config, tree.num_nodes, device)
    return Plan({1: tree}) if table is None else plan_of(table)
