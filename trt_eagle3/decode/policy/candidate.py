"""TreeCandidate: the choices of a policy: no tree, smaller trees and the configured one."""

from __future__ import annotations

from dataclasses import dataclass

from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.speculation.dynamic_tree import DynamicTree
from trt_eagle3.decode.speculation.tree import (
    AnyTree,
    Tree,
    best_first,
    configured_tree,
    static_tree,
)

__all__ = ["Level", "TreeCandidate", "candidate_sizes", "candidates_of", "levels_of", "shrunk"]

Level = tuple[int, int]
"""Depth from 1, and number of siblings at that depth on the likeliest path."""


@dataclass(frozen=True)
class TreeCandidate:
    """A tree that may be drafted, and its levels. None: no speculation."""

    tree: AnyTree | None
    levels: tuple[Level, ...]

    @property
    def num_nodes(self) -> int:
        """Verified nodes per sequence, root included."""
        return self.tree.num_nodes if self.tree else 1


def candidates_of(config: SpeculationConfig) -> list[TreeCandidate]:
    """Return candidates of growing size: no tree first, the configured tree last."""
    sizes = candidate_sizes(configured_tree(config).num_nodes)
    trees = [shrunk(config, size) for size in sizes]
    return [TreeCandidate(tree, levels_of(tree)) for tree in trees]


def candidate_sizes(most: int) -> list[int]:
    """Return tree sizes in nodes: 1 (no tree), then factors of about 1.4 up to ``most``."""
    sizes = {1, most}
    size = 2
    while size < most:
        sizes |= {size, size * 3 // 2}
        size *= 2
    return sorted(n for n in sizes if n <= most)


def shrunk(config: SpeculationConfig, num_nodes: int) -> AnyTree | None:
    """Cut the configured tree to its ``num_nodes`` likeliest nodes; None for 1."""
    if num_nodes == 1:
        return None
    if config.mode == "dynamic":
        return DynamicTree(min(config.steps, num_nodes - 1), config.topk, num_nodes)
    return Tree.from_paths(best_first(static_tree(config).paths)[: num_nodes - 1])


def levels_of(tree: AnyTree | None) -> tuple[Level, ...]:
    """Return the levels of a tree; empty for None.

    A dynamic tree chooses siblings while it grows, so an even spread of its nodes is assumed.
    """
    if tree is None:
        return ()
    if isinstance(tree, DynamicTree):
        width = max(1, min(tree.topk, round((tree.num_nodes - 1) / tree.depth)))
        return tuple((depth, width) for depth in range(1, tree.depth + 1))
    found, parent = list[Level](), 0
    for depth in range(1, tree.depth + 1):
        siblings = [i for i, above in enumerate(tree.parents) if above == parent]
        if not siblings:
            break
        found.append((depth, len(siblings)))
        parent = min(siblings, key=lambda i: tree.ranks[i])
    return tuple(found)
