"""Proposal: the drafted trees of a batch, on the device.

Shapes: B sequences of a padded batch, T tree nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from trt_eagle3.decode.speculation.draft_sampling import DraftSampling
from trt_eagle3.decode.speculation.tree import AnyTree, Tree

__all__ = ["Drawn", "Proposal", "TreeShape", "is_chain", "tree_proposal", "tree_shape"]

_DROPPED = -2  # token of a node that is not verified; no target id, and not ``NO_TOKEN``


@dataclass(frozen=True)
class Drawn:
    """The distributions that the tokens of chains were drawn from, independent of later tokens.

    Attributes:
        ids: int64 [B, T, K] possible target ids of each node's token; the root's are arbitrary.
        probs: float64 [B, T, K] of ``ids``, 0 where there are fewer than K.
        sampling: how they were drawn.
    """

    ids: Tensor
    probs: Tensor
    sampling: DraftSampling

    def cut(self, num_nodes: int) -> Drawn:
        """Return the first nodes of each chain."""
        return replace(self, ids=self.ids[:, :num_nodes], probs=self.probs[:, :num_nodes])

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Drawn:
        """Apply ``change``, which selects sequences, to every tensor."""
        return Drawn(change(self.ids), change(self.probs), self.sampling.mapped(change))


@dataclass(frozen=True)
class Proposal:
    """Trees of one shape, a parent before its children.

    Attributes:
        tree: the tree that was drafted.
        tokens: int64 [B, T], the root first. parents: int64 [B, T], -1 for the root.
        depths: [B, T] integers. mask: bool [B, T, T]: row i is true at i and its ancestors. For a
            static tree parents, depths and mask are on the host.
        num_kept: int32 [B]: leading nodes of each sequence that are verified, at least its root;
            None: all nodes of all sequences.
        drawn: the distributions that the tokens were drawn from; None if they are the draft's
            likeliest tokens.
    """

    tree: AnyTree
    tokens: Tensor
    parents: Tensor
    depths: Tensor
    mask: Tensor
    num_kept: Tensor | None = None
    drawn: Drawn | None = None

    @property
    def is_chain(self) -> bool:
        """Whether every node's parent is the node before it."""
        return is_chain(self.tree)

    def on_device(self) -> Proposal:
        """Return the same with all tensors on the device of ``tokens``.

        A static tree's shape is copied to the device once.
        """
        if not isinstance(self.tree, Tree):
            return self
        shape, size = tree_shape(self.tree, self.tokens.device), len(self.tokens)
        return replace(
            self,
            parents=shape.parents.expand(size, -1),
            depths=shape.depths.expand(size, -1),
            mask=shape.mask.expand(size, -1, -1),
        )

    def first(self, count: int) -> Proposal:
        """Return the trees of the first ``count`` sequences."""
        return self._mapped(lambda field: field[:count])

    def at(self, rows: Tensor) -> Proposal:
        """Return the trees at ``rows``, int64 on the device of ``tokens``."""
        found = self._mapped(lambda field: field.index_select(0, rows.to(field.device)))
        if not isinstance(self.tree, Tree):
            return found
        own = tree_proposal(self.tree, found.tokens)
        return replace(own, num_kept=found.num_kept, drawn=found.drawn)

    def cut(self, tree: AnyTree) -> Proposal:
        """Return the first nodes of chains, as many as the chain ``tree`` has."""
        assert isinstance(tree, Tree)
        found = tree_proposal(tree, self.tokens[:, : tree.num_nodes])
        kept = None if self.num_kept is None else self.num_kept.clamp(max=tree.num_nodes)
        drawn = self.drawn and self.drawn.cut(tree.num_nodes)
        return replace(found, num_kept=kept, drawn=drawn)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Proposal:
        """Apply ``change`` to every tensor."""
        return Proposal(
            self.tree,
            change(self.tokens),
            change(self.parents),
            change(self.depths),
            change(self.mask),
            None if self.num_kept is None else change(self.num_kept),
            None if self.drawn is None else self.drawn.mapped(change),
        )

    def dropped(self) -> Tensor | None:
        """Return bool [B, T]: nodes that are not verified; None if all are."""
        if self.num_kept is None:
            return None
        nodes = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return nodes >= self.num_kept[:, None]

    def pruned(self) -> Proposal:
        """Return the same ``on_device``; dropped nodes become roots with an impossible token."""
        found, dropped = self.on_device(), self.dropped()
        if dropped is None:
            return found
        nodes = torch.arange(dropped.shape[1], device=dropped.device)
        return replace(
            found,
            tokens=found.tokens.masked_fill(dropped, _DROPPED),
            parents=torch.where(dropped, nodes, found.parents),
        )


@dataclass(frozen=True)
class TreeShape:
    """A static tree on a device: ``parents`` int64 [T], ``depths`` int32 [T], ``mask`` bool
    [T, T].
    """

    parents: Tensor
    depths: Tensor
    mask: Tensor


@lru_cache(maxsize=32)
def tree_shape(tree: Tree, device: torch.device) -> TreeShape:
    """Copy ``tree`` to ``device``, once."""
    parents, depths = torch.tensor(tree.parents), tree.depths.int()
    return TreeShape(parents.to(device), depths.to(device), tree.mask.to(device))


def tree_proposal(tree: Tree, tokens: Tensor) -> Proposal:
    """Make a proposal of a static tree whose nodes have ``tokens`` int64 [B, T]."""
    batch = len(tokens)
    return Proposal(
        tree,
        tokens,
        _parents(tree).expand(batch, -1),
        tree.depths.expand(batch, -1),
        tree.mask.expand(batch, -1, -1),
    )


@lru_cache(maxsize=32)
def _parents(tree: Tree) -> Tensor:
    """int64 [T] on the host."""
    return torch.tensor(tree.parents)


def is_chain(tree: AnyTree) -> bool:
    """Return whether every node's parent is the node before it."""
    return isinstance(tree, Tree) and tree.parents == tuple(range(-1, tree.num_nodes - 1))
