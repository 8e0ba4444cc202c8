"""Reference acceptance: a walk down one tree in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["ROUNDING", "Walk", "accept"]

# of sums of float64 probabilities: siblings that have all the mass leave none behind
ROUNDING = 1e-12


class Walk(NamedTuple):
    """The result of a walk.

    Attributes:
        path: nodes from the root to the deepest accepted one.
        tokens: drafted tokens of the path, then the bonus token.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]


def accept(
    tokens: Sequence[int],
    parents: Sequence[int],
    probs: Sequence[float],
    bonus: Sequence[int],
    uniform: Callable[[], float],
) -> Walk:
    """Take the first child that passes, from the root on; emit a bonus token at the end.

    A rejected sibling's mass is gone: the next one passes with its share of what is left.

    Args:
        tokens: [T] at the nodes; siblings differ. parents: [T], the root's is -1.
        probs: [T] the target's probability of a node's token after its parent.
        bonus: [T] the token to emit where the walk ends.
        uniform: the next random number in [0, 1); called only where chance decides.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents[1:], start=1):
        children.setdefault(parent, []).append(node)
    path = [0]
    while (chosen := _chosen(children.get(path[-1], ()), probs, uniform)) is not None:
        path.append(chosen)
    return Walk(tuple(path), (*(tokens[node] for node in path[1:]), bonus[path[-1]]))


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
