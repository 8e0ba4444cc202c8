"""Proposal: the drafted trees of a batch, on the device.

Shapes: B sequences of a padded batch, T tree nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from trt_eagle3.decode.speculation.tree import AnyTree, Tree

__all__ = ["Proposal", "TreeShape", "is_chain", "tree_proposal", "tree_shape"]

_DROPPED = -2  # token of a node that is not verified; no target id, and not ``NO_TOKEN``


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
    """

    tree: AnyTree
    tokens: Tensor
    parents: Tensor
    depths: Tensor
    mask: Tensor
    num_kept: Tensor | None = None

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
        kept = self.num_kept
        return Proposal(
            self.tree,
            self.tokens[:count],
            self.parents[:count],
            self.depths[:count],
            self.mask[:count],
            None if kept is None else kept[:count],
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
