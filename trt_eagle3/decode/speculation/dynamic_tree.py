"""Dynamic trees: the draft's scores choose which branches grow, and which nodes are verified.

EAGLE-2 (arXiv 2406.16858, section 4): a node's score is the sum of the draft's log-probabilities on
its path. Every level expands its ``topk`` best nodes by their ``topk`` best tokens. At the end the
best nodes of all levels are kept. A parent never scores below its child and comes before it, so
the kept nodes form a tree. Of equal scores, the earlier candidate wins.

Shapes: B sequences, k = topk, C candidates (k of the first level, k * k of every later one), T
nodes with the root.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Candidates", "DynamicTree", "Frontier", "ancestors"]


@dataclass(frozen=True)
class DynamicTree:
    """The budget of a dynamic tree.

    Attributes:
        depth: levels below the root. topk: children of a node.
        num_nodes: verified nodes, root included.
    """

    depth: int
    topk: int
    num_nodes: int

    @property
    def num_draft_rows(self) -> int:
        """Rows that the draft runs to grow the tree."""
        return self.topk * (self.depth - 1)


@dataclass(frozen=True)
class Frontier:
    """The nodes of a level that are expanded next.

    Attributes:
        tokens: int64 [B, k]. scores: f32 [B, k].
        candidates: int64 [B, k]: their indices among all candidates.
        parents: int64 [B, k]: index of each node's parent in the previous frontier.
    """

    tokens: Tensor
    scores: Tensor
    candidates: Tensor
    parents: Tensor


class Candidates:
    """All candidate nodes, level by level."""

    def __init__(self, tokens: Tensor, scores: Tensor) -> None:
        """Start with the first level.

        ``tokens`` int64 [B, k]: the best tokens after the root. ``scores`` f32 [B, k]: their
        log-probabilities.
        """
        self._tokens, self._scores = [tokens], [scores]
        self._parents = [torch.full_like(tokens, -1)]

    @property
    def _count(self) -> int:
        return sum(level.shape[1] for level in self._tokens)

    def first(self) -> Frontier:
        """Return the first level; all its nodes are expanded."""
        tokens, scores = self._tokens[0], self._scores[0]
        every = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return Frontier(tokens, scores, every, torch.zeros_like(tokens))

    def add(self, above: Frontier, tokens: Tensor, log_probs: Tensor) -> Frontier:
        """Add the children ``[B, k, k]`` of ``above``; returns the best k of them."""
        topk = tokens.shape[1]
        first, scores = self._count, (above.scores[..., None] + log_probs).flatten(1)
        self._tokens.append(tokens.flatten(1))
        self._scores.append(scores)
        self._parents.append(above.candidates.repeat_interleave(tokens.shape[2], dim=1))
        best = _best(scores, topk)
        return Frontier(
            self._tokens[-1].gather(1, best),
            scores.gather(1, best),
            first + best,
            best // tokens.shape[2],
        )

    def keep(self, count: int) -> tuple[Tensor, Tensor]:
        """Return tokens int64 [B, count] and parents int64 [B, count + 1] of the best nodes.

        Node 0 is the root; its parent is -1.
        """
        tokens, scores, parents = (
            torch.cat(levels, dim=1) for levels in (self._tokens, self._scores, self._parents)
        )
        kept = _best(scores, count).sort(dim=1).values
        of_kept = parents.gather(1, kept)
        nodes = torch.where(of_kept < 0, 0, torch.searchsorted(kept, of_kept) + 1)
        root = torch.full_like(nodes[:, :1], -1)
        return tokens.gather(1, kept), torch.cat([root, nodes], dim=1)


def _best(scores: Tensor, count: int) -> Tensor:
    """Return indices int64 [B, count] of the best ``scores`` [B, n], earlier equals first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def ancestors(parents: Tensor, depth: int) -> Tensor:
    """Return bool [B, T, T]: row i is true at i and its ancestors.

    ``depth``: most levels below the root.
    """
    own = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device).expand(
        *parents.shape, -1
    )
    index = parents.clamp(min=0)[..., None].expand_as(own)
    mask = own
    for _ in range(depth):
        mask = own | mask.gather(1, index)
    return mask
