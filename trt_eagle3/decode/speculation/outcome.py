"""What a cycle's sequences say, found on the device: ``accept`` of trees of a batch, those whose
every chance is 0 or 1 among them.

Shapes: B sequences, T tree nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from trt_eagle3.decode.speculation.accept import ROUNDING, Accepted, agreeing
from trt_eagle3.decode.speculation.propose import Proposal
from trt_eagle3.decode.speculation.tree import AnyTree, Tree

__all__ = [
    "Outcome",
    "TreeShape",
    "accept_drawn",
    "accept_greedy",
    "accept_trees",
    "greedy_tokens",
    "is_chain",
    "on_device",
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
        draws: int64 [B] random numbers that it has used.
    """

    counts: Tensor
    finite: Tensor
    tokens: Tensor
    path: Tensor
    last: Tensor
    draws: Tensor

    def packed(self) -> Tensor:
        """int64 [B, 2 + 2 T] for ``unpacked``."""
        counts = self.counts * self.finite
        return torch.cat([counts[:, None], self.draws[:, None], self.tokens, self.path], dim=1)

    @staticmethod
    def unpacked(rows: list[list[int]], steps: int = 0) -> list[Accepted]:
        """The outcome of each sequence from ``packed``, on the host, of trees of ``steps``
        levels.
        """
        found = []
        for row in rows:
            (count, draws), path = row[:2], 1 + len(row) // 2
            tokens = tuple(row[2 : 2 + count])
            nodes = tuple(row[path : path + max(count, 1)])
            found.append(Accepted(nodes, tokens, steps, draws=draws))
        return found


def greedy_tokens(logits: Tensor) -> Tensor:
    """int64 [...]: the likeliest token of each row of ``logits`` [..., V], the first of equals; -1
    where one is no number.
    """
    best, tokens = logits.max(dim=-1)
    return tokens.masked_fill_(best * 0 != 0, _NO_TOKEN)  # ``isfinite`` is five launches


def is_chain(tree: object) -> bool:
    """Whether every node's parent is the node before it."""
    return isinstance(tree, Tree) and tree.parents == tuple(range(-1, tree.num_nodes - 1))


def accept_greedy(proposal: Proposal, target_ids: Tensor, *, chain: bool) -> Outcome:
    """Follow the target's own choices down every tree.

    Args:
        target_ids: int64 [B, T]: ``greedy_tokens`` at the nodes. chain: the trees are chains.
    """
    tokens = proposal.tokens
    size, num_nodes = tokens.shape
    constants = _constants(size, num_nodes, tokens.device)
    if chain:  # what it emits is what the target says, as far as the draft agrees
        ends = (tokens[:, 1:] == target_ids[:, :-1]).cumprod(dim=1).sum(dim=1)
        last = target_ids.gather(1, ends[:, None])[:, 0]
        finite = (target_ids != _NO_TOKEN).all(dim=1)
        return Outcome(ends + 1, finite, target_ids, constants.path, last, constants.no_draws)
    parents = proposal.parents.to(tokens.device, non_blocking=True)
    mask = proposal.mask.to(tokens.device, non_blocking=True)
    right = agreeing(tokens, parents, target_ids)
    return _outcome(tokens, *_followed(mask, right), target_ids, constants.no_draws)


def accept_drawn(
    proposal: Proposal, accept_probs: Tensor, bonus: Tensor, uniform: Tensor
) -> Outcome:
    """``accept.accept`` of every tree, over the same random numbers.

    A node's number is the one after those of all nodes that are asked before it on the way there,
    so all nodes are looked at together.

    Args:
        proposal: on the device.
        accept_probs: float64 [B, T]: the target's probability of a node's token after its parent.
        bonus: int64 [B, T]: the token to emit where the walk ends, -1 after logits that are no
            numbers.
        uniform: float64 [B, T]: the next random numbers, behind the one that drew ``bonus``.
    """
    tokens, parents, mask = proposal.tokens, proposal.parents, proposal.mask
    nodes = torch.arange(tokens.shape[1], device=tokens.device)
    # those whose parent is this one's, and that are asked before it
    elder = (parents[:, :, None] == parents[:, None, :]) & (nodes < nodes[:, None])
    left = 1.0 - (elder * accept_probs[:, None, :]).sum(dim=2)
    possible = accept_probs > 0.0
    certain = possible & (accept_probs >= left - ROUNDING)
    drawn = possible & ~certain
    above = mask & (nodes != nodes[:, None]) & (nodes > 0)
    asked = above | (mask.float() @ elder.float() > 0)
    index = (asked & drawn[:, None, :]).sum(dim=2).clamp(max=len(nodes) - 1)
    passes = certain | (drawn & (uniform.gather(1, index) * left < accept_probs))
    first = ~(elder & passes[:, None, :]).any(dim=2)
    counts, path = _followed(mask, passes & first)
    reached = torch.zeros_like(possible).scatter(1, path, nodes < counts[:, None])
    looked_at = reached.gather(1, parents.clamp(min=0)) & (nodes > 0) & first & drawn
    return _outcome(tokens, counts, path, bonus, looked_at.sum(dim=1))


@dataclass(frozen=True)
class _Constants:
    """Of batches of one shape, only to be read: the ``path`` int64 [B, T] of chains, and ``draws``
    int64 [B] of sequences that draw none.
    """

    path: Tensor
    no_draws: Tensor


@lru_cache(maxsize=256)
def _constants(size: int, num_nodes: int, device: torch.device) -> _Constants:
    path = torch.arange(num_nodes, device=device).expand(size, -1).contiguous()
    return _Constants(path, torch.zeros(size, dtype=torch.int64, device=device))


def _followed(mask: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """``counts`` and ``path`` of trees whose nodes that are ``right`` bool [B, T] are followed."""
    nodes = torch.arange(right.shape[1], device=right.device)
    wrong = ~right & (nodes > 0)
    accepted = ~(mask & wrong[:, None]).any(dim=2)
    path = torch.where(accepted, nodes, nodes + len(nodes)).argsort(dim=1)
    return accepted.sum(dim=1), path


def _outcome(
    tokens: Tensor, counts: Tensor, path: Tensor, target_ids: Tensor, draws: Tensor
) -> Outcome:
    """Of trees of ``tokens``, followed down ``path`` to the node after ``counts`` - 1 others."""
    nodes = torch.arange(tokens.shape[1], device=tokens.device)
    last = target_ids.gather(1, path.gather(1, counts[:, None] - 1))
    following = tokens.gather(1, path).roll(-1, dims=1)
    return Outcome(
        counts=counts,
        finite=(target_ids != _NO_TOKEN).all(dim=1),
        tokens=torch.where(nodes == counts[:, None] - 1, last, following),
        path=path,
        last=last[:, 0],
        draws=draws,
    )


def accept_trees(tree: AnyTree, proposal: Proposal, target_ids: Tensor) -> Outcome:
    """``accept_greedy`` of proposals of ``tree``, whose shape is not copied every time."""
    placed = on_device(tree, proposal, target_ids.device)
    return accept_greedy(placed, target_ids, chain=is_chain(tree))


def on_device(tree: AnyTree, proposal: Proposal, device: torch.device) -> Proposal:
    """``proposal`` of ``tree``, all of it on ``device``; a static tree's shape is there already."""
    size, tokens = len(proposal.tokens), proposal.tokens.to(device, non_blocking=True)
    if not isinstance(tree, Tree):
        others = (proposal.parents, proposal.depths, proposal.mask)
        return Proposal(tokens, *(field.to(device, non_blocking=True) for field in others))
    shape = tree_shape(tree, device)
    parents, mask = shape.parents.expand(size, -1), shape.mask.expand(size, -1, -1)
    return Proposal(tokens, parents, proposal.depths, mask)


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
