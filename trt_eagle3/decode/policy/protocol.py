"""The interface between scheduler and policy: ``Policy``, ``BatchState``, ``StepStats``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trt_eagle3.decode.policy.cost import StepCost
from trt_eagle3.decode.speculation.tree import AnyTree

__all__ = ["BatchState", "FixedPolicy", "Policy", "StepStats"]


@dataclass(frozen=True)
class BatchState:
    """The sequences of a step.

    Attributes:
        size: sequences that decode.
        num_drafting: decoding sequences with a draft.
        num_running: all running sequences, those in prefill included.
        seeded: whether a sequence samples with a seed.
    """

    size: int
    num_drafting: int
    num_running: int
    seeded: bool = False


@dataclass(frozen=True)
class StepStats:
    """A finished step.

    Attributes:
        tree: the verified tree; None without speculation.
        accepted: accepted levels by sequence; None if it did not draft.
        seconds: since the end of the previous step; None if the engine was idle between.
        prompt_rows: prompt rows in the step.
        backfilled_rows: rows that the draft backfilled.
    """

    batch: BatchState
    tree: AnyTree | None
    accepted: Sequence[int | None]
    seconds: float | None = None
    prompt_rows: int = 0
    backfilled_rows: int = 0

    @property
    def num_nodes(self) -> int:
        """Verified nodes of each sequence, root included."""
        return self.tree.num_nodes if self.tree else 1

    @property
    def num_tokens(self) -> int:
        """Tokens that the step emitted."""
        return sum((n or 0) + 1 for n in self.accepted)


class Policy(Protocol):
    """Chooses the tree of every step."""

    @property
    def speculates(self) -> bool:
        """Whether the policy may choose a tree."""
        ...

    @property
    def needs_costs(self) -> bool:
        """Whether the policy needs ``prime`` to choose well."""
        ...

    def choose(self, batch: BatchState) -> AnyTree | None:
        """Choose the tree for ``batch``; None: no speculation."""
        ...

    def should_draft(self, batch: BatchState) -> bool:
        """Return whether to draft a new sequence. ``batch``: includes the new sequence."""
        ...

    def trees_at(self, batch_size: int) -> Sequence[AnyTree | None]:
        """Return all trees that it may choose at ``batch_size``, for capture; likeliest first."""
        ...

    def prime(self, tree: AnyTree | None, batch_size: int, seconds: float) -> None:
        """Add a step that was measured at start, with short contexts."""
        ...

    def prime_prompts(self, num_rows: int, seconds: float) -> None:
        """Add a prefill that was measured at start."""
        ...

    def prompt_rows(self, batch: BatchState, seconds: float) -> int | None:
        """Return how many prompt rows fit into ``seconds`` beside a step of ``batch``.

        None if the costs are not known.
        """
        ...

    def record(self, stats: StepStats) -> None:
        """Update the policy with a finished step."""
        ...


class FixedPolicy:
    """Always chooses the same tree. None: no speculation."""

    needs_costs = False

    def __init__(self, tree: AnyTree | None) -> None:
        self._tree = tree
        self._cost = StepCost()

    @property
    def speculates(self) -> bool:
        """Whether there is a tree."""
        return self._tree is not None

    def choose(self, batch: BatchState) -> AnyTree | None:
        """Return the tree, if any sequence has a draft."""
        return self._tree if batch.num_drafting else None

    def should_draft(self, _batch: BatchState) -> bool:
        """Return True."""
        return True

    def trees_at(self, _batch_size: int) -> Sequence[AnyTree | None]:
        """Return the tree, and None for sequences near the length limit."""
        return (None,) if self._tree is None else (self._tree, None)

    def prime(self, tree: AnyTree | None, batch_size: int, seconds: float) -> None:
        """Add a step that was measured at start, with short contexts."""
        self._cost.prime(tree.num_nodes if tree else 1, batch_size, seconds)

    def prime_prompts(self, num_rows: int, seconds: float) -> None:
        """Add a prefill that was measured at start."""
        self._cost.prime_prompts(num_rows, seconds)

    def prompt_rows(self, batch: BatchState, seconds: float) -> int | None:
        """Return how many prompt rows fit into ``seconds`` beside a step of ``batch``."""
        if not self._cost.knows_prompts:
            return None
        tree = self.choose(batch)
        nodes = tree.num_nodes if tree else 1
        return self._cost.prompt_rows(seconds, nodes, batch.size, batch.num_running)

    def record(self, stats: StepStats) -> None:
        """Update the costs from a step."""
        batch, seconds = stats.batch, stats.seconds
        if seconds is not None and batch.size and not stats.backfilled_rows:
            self._cost.observe(
                stats.num_nodes, batch.size, batch.num_running, stats.prompt_rows, seconds
            )
