"""Acceptance: which of the drafted tokens the target accepts. Greedy is the case of certainty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trt_eagle3.decode.request.request import TokenLogprob
from trt_eagle3.decode.speculation.tree import AnyTree

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ROUNDING", "Accepted", "CycleOutcome", "accept", "agreeing"]

# of sums of float64 probabilities: siblings that have all the mass leave none behind
ROUNDING = 1e-12


@dataclass(frozen=True)
class Accepted:
    """One cycle's outcome.

    Attributes:
        path: nodes from the root to the deepest accepted one.
        tokens: what to emit: the drafted tokens on the path, then the bonus token.
        steps: levels of the tree below its root.
        logprobs: of each of ``tokens``, where its request wants them.
        draws: random numbers of the sequence that were used, and are not taken from it yet.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    steps: int = field(default=0, compare=False)
    logprobs: tuple[TokenLogprob, ...] = field(default=(), compare=False)
    draws: int = field(default=0, compare=False)


@dataclass(frozen=True)
class CycleOutcome:
    """The outcome of a cycle of several sequences.

    Attributes:
        accepted: of each; None of one that was not in it.
        tree: that was drafted for those that have ``steps``; None of a plain pass.
    """

    accepted: Sequence[Accepted | None]
    tree: AnyTree | None


def accept(
    tokens: Sequence[int],
    parents: Sequence[int],
    probs: Sequence[float],
    bonus: Sequence[int],
    uniform: Callable[[], float],
) -> Accepted:
    """Walk from the root: of a node's children, in order, the first that its chance lets pass; then
    a bonus token.

    A rejected sibling's mass is gone: the next one's chance is its share of what is left. So each
    token is emitted with exactly the target's probability, whatever was drafted (``sampling``).

    Args:
        tokens: [T] at the nodes; siblings differ. parents: [T], the root's is -1.
        probs: [T] the target's probability of a node's token after its parent.
        bonus: [T] the token to emit where the walk ends.
        uniform: the next random number in [0, 1); asked only where chance decides.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents[1:], start=1):
        children.setdefault(parent, []).append(node)
    path = [0]
    while (chosen := _chosen(children.get(path[-1], ()), probs, uniform)) is not None:
        path.append(chosen)
    return Accepted(tuple(path), (*(tokens[node] for node in path[1:]), bonus[path[-1]]))


def agreeing(tokens: Tensor, parents: Tensor, target_ids: Tensor) -> Tensor:
    """bool [B, T]: whether a node's token is the one that the target says after its parent.

    ``tokens``, ``parents``, ``target_ids``: int64 [B, T]; a root's parent is -1.
    """
    return tokens == target_ids.gather(1, parents.clamp(min=0))


def _chosen(
    siblings: Sequence[int], probs: Sequence[float], uniform: Callable[[], float]
) -> int | None:
    left = 1.0
    for node in siblings:
        prob = probs[node]
        if prob > 0.0 and (prob >= left - ROUNDING or uniform() * left < prob):
            return node
        left -= prob
    return None
