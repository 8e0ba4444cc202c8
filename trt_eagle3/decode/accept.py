"""Acceptance: which of the drafted tokens the target would have said itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Accepted", "accept_greedy"]


@dataclass(frozen=True)
class Accepted:
    """One cycle's outcome.

    Attributes:
        path: nodes from the root to the deepest accepted one.
        tokens: what to emit: the drafted tokens on the path, then the bonus token.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]


def accept_greedy(target_tokens: Sequence[int], draft_tokens: Sequence[int], parents: Sequence[int]) -> Accepted:
    """Follow from the root the child that says what the target says, as deep as there is one; then a bonus token.

    Args:
        target_tokens: [T] the target's greedy token after each node.
        draft_tokens: [T] the token at each node; the root's is the last accepted token.
        parents: [T] parent of each node; the root's is -1.
    """
    child = {(parent, token): i for i, (parent, token) in enumerate(zip(parents, draft_tokens, strict=True)) if i > 0}
    path = [0]
    while (node := child.get((path[-1], target_tokens[path[-1]]))) is not None:
        path.append(node)
    return Accepted(tuple(path), tuple(target_tokens[node] for node in path))
