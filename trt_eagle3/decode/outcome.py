"""What a cycle's sequences say, on the device; where all are greedy, it is found there: ``accept``
of trees whose every chance is 0 or 1.

Shapes: B sequences, T tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from trt_eagle3.decode.accept import Accepted
from trt_eagle3.decode.propose import Proposal
from trt_eagle3.decode.transfer import to_device
from trt_eagle3.decode.tree import AnyTree, Tree

__all__ = [
    "Outcome",
    "TreeShape",
    "accept_greedy",
    "accept_trees",
    "greedy_tokens",
    "is_chain",
    "tree_shape",
]

_NO_TOKEN = -1


@dataclass(frozen=True)
class Outcome:
    """What each sequence says.

    Attributes:
        counts: int64 [B] tokens that each emits, at least 1. finite: bool [B]: its logits are
            numbers; it says nothing otherwise.
        tokens: int64 [B, T] what it emits, then anything.
        path: int64 [B, T] nodes from the root to the deepest accepted one, then the others.
        last: int64 [B] the last token that it emits.
    """

    counts: Tensor
    finite: Tensor
    tokens: Tensor
    path: Tensor
    last: Tensor

    def packed(self) -> Tensor:
        """int64 [B, 1 + 2 T] for ``unpacked``."""
        counts = self.counts.masked_fill(~self.finite, 0)
        return torch.cat([counts[:, None], self.tokens, self.path], dim=1)

    @classmethod
    def of(
        cls, found: Sequence[Accepted], num_nodes: int, size: int, device: torch.device
    ) -> Outcome:
        """What the host accepted, padded to ``size`` sequences, on ``device``."""
        fields = torch.zeros(size, 1 + 2 * num_nodes, dtype=torch.int64)
        fields[:, 0] = 1
        for row, accepted in zip(fields, found, strict=False):
            others = [n for n in range(num_nodes) if n not in accepted.path]
            tokens = [*accepted.tokens, *[0] * (num_nodes - len(accepted.tokens))]
            row[:] = torch.tensor([len(accepted.path), *tokens, *accepted.path, *others])
        there = to_device(fields, device)
        counts, tokens, path = there.split([1, num_nodes, num_nodes], dim=1)
        last = tokens.gather(1, counts - 1)[:, 0]
        return cls(counts[:, 0], counts[:, 0] > 0, tokens, path, last)

    @staticmethod
    def unpacked(rows: list[list[int]], steps: int = 0) -> list[Accepted]:
        """The outcome of each sequence from ``packed``, on the host, of trees of ``steps``
        levels.
        """
        found = []
        for row in rows:
            count, path = row[0], 1 + len(row) // 2
            tokens = tuple(row[1 : 1 + count])
            found.append(Accepted(tuple(row[path : path + max(count, 1)]), tokens, steps))
        return found


def greedy_tokens(logits: Tensor) -> Tensor:
    """int64 [...]: the likeliest token of each row of ``logits`` [..., V], the first of equals; -1
    where one is no number.
    """
    best, tokens = logits.max(dim=-1)
    return tokens.masked_fill_(~best.isfinite(), _NO_TOKEN)


def is_chain(tree: object) -> bool:
    """Whether every node's parent is the node before it."""
    return isinstance(tree, Tree) and tree.parents == tuple(range(-1, tree.num_nodes - 1))


def accept_greedy(proposal: Proposal, target_ids: Tensor, *, chain: bool) -> Outcome:
    """Follow the target's own choices down every tree.

    Args:
        target_ids: int64 [B, T]: ``greedy_tokens`` at the nodes. chain: the trees are chains.
    """
    tokens, num_nodes = proposal.tokens, proposal.tokens.shape[1]
    nodes = torch.arange(num_nodes, device=tokens.device)
    if chain:
        right = (tokens[:, 1:] == target_ids[:, :-1]).cumprod(dim=1)
        counts = right.sum(dim=1) + 1
        path = nodes.expand_as(tokens)
    else:
        parents = proposal.parents.to(tokens.device, non_blocking=True)
        mask = proposal.mask.to(tokens.device, non_blocking=True)
        wrong = tokens != target_ids.gather(1, parents.clamp(min=0))
        wrong[:, 0] = False
        accepted = ~(mask & wrong[:, None]).any(dim=2)
        counts = accepted.sum(dim=1)
        path = torch.where(accepted, nodes, nodes + num_nodes).argsort(dim=1)
    last = target_ids.gather(1, path.gather(1, counts[:, None] - 1))
    following = tokens.gather(1, path).roll(-1, dims=1)
    return Outcome(
        counts=counts,
        finite=(target_ids != _NO_TOKEN).all(dim=1),
        tokens=torch.where(nodes == counts[:, None] - 1, last, following),
        path=path,
        last=last[:, 0],
    )


def accept_trees(tree: AnyTree, proposal: Proposal, target_ids: Tensor) -> Outcome:
    """``accept_greedy`` of proposals of ``tree``, whose shape is not copied every time."""
    if isinstance(tree, Tree):
        shape, size = tree_shape(tree, target_ids.device), len(target_ids)
        parents, mask = shape.parents.expand(size, -1), shape.mask.expand(size, -1, -1)
        proposal = replace(proposal, parents=parents, mask=mask)
    return accept_greedy(proposal, target_ids, chain=is_chain(tree))


@dataclass(frozen=True)
class TreeShape:
    """A static tree on the device: ``parents`` int64 [T], ``depths`` int32 [T], ``mask`` bool
    [T, T].
    """

    parents: Tensor
    depths: Tensor
    mask: Tensor


@lru_cache(maxsize=32)
def tree_shape(tree: Tree, device: torch.device) -> TreeShape:
    """``tree`` on ``device``."""
    parents, depths = torch.tensor(tree.parents), tree.depths.int()
    return TreeShape(parents.to(device), depths.to(device), tree.mask.to(device))
