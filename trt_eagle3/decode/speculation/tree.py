"""Draft trees: their shapes, and how a draft fills them.

Node 0 is the root, the last accepted token. Parents come before their children. A chain is a tree.

Shapes: T nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush

import torch
from torch import Tensor

from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.speculation.dynamic_tree import DynamicTree
from trt_eagle3.errors import UserError

__all__ = [
    "AnyTree",
    "DraftStep",
    "Tree",
    "best_first",
    "best_first_paths",
    "configured_tree",
    "static_tree",
]

Path = tuple[int, ...]


@dataclass(frozen=True)
class DraftStep:
    """How the n nodes of one level are filled and expanded.

    Attributes:
        parents: int64 [n]: row of each node's parent among the rows of the previous step.
        ranks: int64 [n]: rank of each node's token among its parent's best tokens.
        inner: int64 [m]: the nodes of this level that have children. This step runs them.
        num_shared: leading inner nodes of the levels above that are ancestors of all of these. In
            a chain all are, so all its levels have one shape.
        mask: bool [m, remaining inner nodes so far]: attention among them; None at the last level.
        width: number of best tokens taken from each parent.
    """

    parents: Tensor
    ranks: Tensor
    inner: Tensor
    num_shared: int
    mask: Tensor | None
    width: int

    @cached_property
    def is_link(self) -> bool:
        """Whether the step is a link of a chain: one node, the best child of the previous one."""
        return len(self.parents) == self.width == 1

    def to(self, device: torch.device) -> DraftStep:
        """Return the same with indices on ``device``; the mask stays on the host."""
        parents, ranks, inner = (t.to(device) for t in (self.parents, self.ranks, self.inner))
        return replace(self, parents=parents, ranks=ranks, inner=inner)


@dataclass(frozen=True)
class Tree:
    """A static tree, its nodes level by level.

    Attributes:
        parents: parent of each node; the root's is -1.
        ranks: rank of a node's token among its parent's best tokens (0 = the best); the root's is
            0.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def from_paths(cls, paths: Sequence[Path]) -> Tree:
        """Make a tree of the nodes at ``paths`` (ranks from the root), level by level.

        Raises:
            UserError: a path whose parent is not in the tree, or one given twice.
        """
        ordered = [(), *sorted(paths, key=lambda path: (len(path), path))]
        index = {path: i for i, path in enumerate(ordered)}
        for path in ordered[1:]:
            if not path or path[:-1] not in index:
                raise UserError(
                    f"speculation.tree: path {list(path)} has no parent {list(path[:-1])} in the "
                    "tree"
                )
        if len(index) != len(ordered):
            raise UserError("speculation.tree: a path is given twice")
        parents = [-1, *(index[path[:-1]] for path in ordered[1:])]
        return cls(tuple(parents), tuple(path[-1] if path else 0 for path in ordered))

    @classmethod
    def root_only(cls) -> Tree:
        """Return the tree of autoregressive decoding: the root only."""
        return cls((-1,), (0,))

    @property
    def num_nodes(self) -> int:
        """Nodes, the root included."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return len(self.levels)

    @cached_property
    def num_draft_rows(self) -> int:
        """Rows that the draft runs to fill it."""
        return len(set(self.parents[1:]) - {0})

    @property
    def paths(self) -> list[Path]:
        """Ranks from the root to every node but the root."""
        paths: list[Path] = [()]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            paths.append((*paths[parent], rank))
        return paths[1:]

    @cached_property
    def depths(self) -> Tensor:
        """int64 [T]: steps from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return torch.tensor(depths)

    @cached_property
    def mask(self) -> Tensor:
        """bool [T, T]: row i is true at i and its ancestors."""
        mask = torch.eye(self.num_nodes, dtype=torch.bool)
        for i, parent in enumerate(self.parents[1:], start=1):
            mask[i] |= mask[parent]
        return mask

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Nodes by depth, from depth 1 on."""
        depths = self.depths.tolist()
        return tuple(
            tuple(i for i, d in enumerate(depths) if d == level)
            for level in range(1, max(depths) + 1)
        )

    @cached_property
    def _steps(self) -> tuple[DraftStep, ...]:
        # above: nodes whose logits the previous step computed
        steps, above, drafted = [], [0], list[int]()
        for nodes in self.levels:
            inner = [node for node in nodes if node in self.parents]
            shared = next(
                (i for i, node in enumerate(drafted) if not self.mask[inner, node].all()),
                len(drafted),
            )
            drafted += inner
            step = DraftStep(
                parents=torch.tensor([above.index(self.parents[node]) for node in nodes]),
                ranks=torch.tensor([self.ranks[node] for node in nodes]),
                inner=torch.tensor([nodes.index(node) for node in inner], dtype=torch.int64),
                num_shared=shared,
                mask=self.mask[inner][:, drafted[shared:]] if inner else None,
                width=max(self.ranks[node] for node in nodes) + 1,
            )
            steps.append(step)
            above = inner
        return tuple(steps)

    @cached_property
    def _steps_by_device(self) -> dict[torch.device, tuple[DraftStep, ...]]:
        return {}

    def steps_on(self, device: torch.device) -> tuple[DraftStep, ...]:
        """Return the draft steps that fill the tree, one per level, with indices on ``device``."""
        if device not in self._steps_by_device:
            self._steps_by_device[device] = tuple(step.to(device) for step in self._steps)
        return self._steps_by_device[device]


AnyTree = Tree | DynamicTree
"""A static or a dynamic tree."""


def configured_tree(config: SpeculationConfig) -> AnyTree:
    """Make the tree that ``config`` describes, static or dynamic."""
    if config.mode != "dynamic":
        return static_tree(config)
    return DynamicTree(
        config.steps, config.topk, config.num_draft_tokens or config.steps * config.topk + 1
    )


def static_tree(config: SpeculationConfig) -> Tree:
    """Make the chain or static tree that ``config`` describes."""
    if config.mode == "chain":
        return Tree.from_paths([(0,) * depth for depth in range(1, config.steps + 1)])
    if config.tree is not None:
        return Tree.from_paths(config.tree)
    tokens = config.num_draft_tokens or config.steps * config.topk + 1
    return Tree.from_paths(best_first_paths(config.steps, config.topk, tokens - 1))


def best_first_paths(steps: int, topk: int, count: int) -> list[Path]:
    """Return the ``count`` likeliest paths by the prior of ``_cost``.

    Paths have at most ``steps`` ranks, each below ``topk``. For common budgets, measured tree
    shapes perform nearly alike. ``speculation.tree`` accepts any other shape.

    Raises:
        UserError: fewer than ``count`` such paths exist.
    """
    costs = [_cost((rank,)) for rank in range(topk)]
    heap: list[tuple[float, Path]] = [(cost, (rank,)) for rank, cost in enumerate(costs)]
    heap.sort()
    paths: list[Path] = []
    while heap and len(paths) < count:
        cost, path = heappop(heap)
        paths.append(path)
        if len(path) < steps:
            for rank, step_cost in enumerate(costs):
                heappush(heap, (cost + step_cost, (*path, rank)))
    if len(paths) < count:
        raise UserError(
            f"speculation.num_draft_tokens: {steps} steps of topk {topk} make at most "
            f"{len(paths) + 1} nodes, got {count + 1}. Lower it, or raise steps or topk."
        )
    return paths


def best_first(paths: Sequence[Path]) -> list[Path]:
    """Sort ``paths`` of a tree by acceptance probability, the likeliest first.

    Every prefix of the list is a tree too.
    """
    return sorted(paths, key=lambda path: (_cost(path), len(path), path))


def _cost(path: Path) -> float:
    """Return minus the log of the prior probability that ``path`` is accepted.

    The prior: the draft's token of rank r (from 0) is right with probability 0.7 / (r + 1) ** 2,
    independent of depth.
    """
    return sum(-math.log(0.7 / (rank + 1) ** 2) for rank in path)
