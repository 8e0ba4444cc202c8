"""Acceptance on the device: which drafted tokens of a batch the target accepts.

A walk starts at the root. It tries a node's children in order and takes the first that passes. At
the end it emits a bonus token. A rejected child's probability mass is removed: the next child
passes with its share of the remaining mass. So each token is emitted with exactly the target's
probability, independent of the draft (SpecInfer, arXiv 2305.09781, section 4.3, with a
deterministic draft). In greedy decoding every probability is 0 or 1.

Shapes: B sequences, T tree nodes, D nodes of the deepest path, its root included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from trt_eagle3.decode.sampling.logprobs import TokenLogprob
from trt_eagle3.decode.sampling.sampler import agreeing
from trt_eagle3.decode.speculation.proposal import Proposal

__all__ = [
    "NO_TOKEN",
    "ROUNDING",
    "Accepted",
    "AcceptedPaths",
    "accept_greedy",
    "accept_sampled",
    "greedy_tokens",
]

NO_TOKEN = -1
"""The token after logits that are not finite."""
# tolerance for sums of float64 probabilities: siblings with all the mass must leave exactly 0
ROUNDING = 1e-12


@dataclass(frozen=True)
class Accepted:
    """The tokens that one sequence emits in a step, on the host.

    Attributes:
        tokens: drafted tokens of the accepted path, then the bonus token; empty after logits that
            are not finite.
        tree_depth: levels of the verified tree below its root; 0 without a draft.
        logprobs: of each of ``tokens``, if the request wants them.
        draws: random numbers used, the bonus token's not counted.
    """

    tokens: tuple[int, ...]
    tree_depth: int = field(default=0, compare=False)
    logprobs: tuple[TokenLogprob, ...] = field(default=(), compare=False)
    draws: int = field(default=0, compare=False)


@dataclass(frozen=True)
class AcceptedPaths:
    """The accepted path of each sequence of a batch, on the device.

    Attributes:
        counts: int64 [B] tokens that each sequence emits, at least 1.
        tokens: int64 [B, D] emitted tokens, then arbitrary values.
        path: int64 [B, D] nodes from the root to the deepest accepted one, then arbitrary values.
        last: int64 [B] the last emitted token; ``NO_TOKEN`` after logits that are not finite.
        draws: int64 [B] random numbers used, the bonus token's not counted.
        target_ids: int64 [B, T] the target's token after each verified node.
    """

    counts: Tensor
    tokens: Tensor
    path: Tensor
    last: Tensor
    draws: Tensor
    target_ids: Tensor

    @property
    def finite(self) -> Tensor:
        """bool [B]: whether all logits of a sequence are finite; otherwise it emits no token."""
        return (self.target_ids != NO_TOKEN).all(dim=1)

    def packed(self) -> Tensor:
        """Copy to one tensor for ``unpacked``: int64 [B, 2 + D], or [B] without a tree."""
        if self.tokens.shape[1] == 1:  # one launch is enough without a tree
            return self.last.clone()
        counts = self.counts * self.finite
        return torch.cat([counts[:, None], self.draws[:, None], self.tokens], dim=1)

    @staticmethod
    def unpacked(packed: list[int] | list[list[int]], tree_depth: int) -> list[Accepted]:
        """Unpack ``packed``, read to the host, of a tree of ``tree_depth`` levels."""
        found = []
        for row in packed:
            if isinstance(row, int):
                found.append(Accepted((row,) if row != NO_TOKEN else ()))
            else:
                count, draws = row[:2]
                found.append(Accepted(tuple(row[2 : 2 + count]), tree_depth, draws=draws))
        return found


def greedy_tokens(logits: Tensor) -> Tensor:
    """Return the likeliest token of each row of ``logits`` [..., V], int64 [...].

    The first of equals wins. ``NO_TOKEN`` if the largest logit is not finite.
    """
    best, tokens = logits.max(dim=-1)
    return tokens.masked_fill_(best * 0 != 0, NO_TOKEN)  # ``isfinite`` takes five launches


def accept_greedy(proposal: Proposal, target_ids: Tensor) -> AcceptedPaths:
    """Accept the nodes of every tree that equal the target's greedy tokens.

    ``target_ids`` int64 [B, T]: ``greedy_tokens`` at the nodes.
    """
    size, num_nodes = proposal.tokens.shape
    if num_nodes == 1:
        alone = _roots(size, proposal.tokens.device)
        return AcceptedPaths(
            alone.counts, target_ids, alone.path, target_ids[:, 0], alone.no_draws, target_ids
        )
    if proposal.is_chain:  # emits the target's tokens up to the first that the draft missed
        agree = proposal.tokens[:, 1:] == target_ids[:, :-1]
        dropped = proposal.dropped()
        if dropped is not None:
            agree = agree & ~dropped[:, 1:]
            target_ids = target_ids.masked_fill(dropped, 0)
        ends = agree.cumprod(dim=1).sum(dim=1)
        last = target_ids.gather(1, ends[:, None])[:, 0]
        fixed = _chains(size, num_nodes, target_ids.device)
        return AcceptedPaths(ends + 1, target_ids, fixed.path, last, fixed.no_draws, target_ids)
    pruned, dropped = proposal.pruned(), proposal.dropped()
    if dropped is not None:
        target_ids = target_ids.masked_fill(dropped, 0)
    right = agreeing(pruned.tokens, pruned.parents, target_ids)
    draws = _chains(size, num_nodes, target_ids.device).no_draws
    return _accepted(pruned, *_accepted_nodes(pruned, right), target_ids, draws)


def accept_sampled(
    proposal: Proposal, accept_probs: Tensor, bonus: Tensor, uniform: Tensor
) -> AcceptedPaths:
    """Walk down every tree by random acceptance.

    The index of a node's random number is the number of nodes that a walk draws for before it. So
    all nodes are tried in parallel.

    Args:
        proposal: ``pruned``.
        accept_probs: float64 [B, T]: the target's probability of a node's token after its parent;
            0 at dropped nodes.
        bonus: int64 [B, T]: the token to emit where the walk ends, ``NO_TOKEN`` after logits that
            are not finite.
        uniform: float64 [B, T]: the next random numbers, after the one that drew ``bonus``.
    """
    parents, mask = proposal.parents, proposal.mask
    nodes = torch.arange(parents.shape[1], device=parents.device)
    # siblings that are tried before a node
    elder = (parents[:, :, None] == parents[:, None, :]) & (nodes < nodes[:, None])
    left = 1.0 - (elder * accept_probs[:, None, :]).sum(dim=2)
    possible = accept_probs > 0.0
    certain = possible & (accept_probs >= left - ROUNDING)
    drawn = possible & ~certain
    above = mask & (nodes != nodes[:, None]) & (nodes > 0)
    tried = above | (mask.float() @ elder.float() > 0)
    index = (tried & drawn[:, None, :]).sum(dim=2).clamp(max=len(nodes) - 1)
    passes = certain | (drawn & (uniform.gather(1, index) * left < accept_probs))
    first = ~(elder & passes[:, None, :]).any(dim=2)
    counts, path = _accepted_nodes(proposal, passes & first)
    reached = torch.zeros_like(possible).scatter(1, path, nodes[: path.shape[1]] < counts[:, None])
    looked_at = reached.gather(1, parents.clamp(min=0)) & (nodes > 0) & first & drawn
    return _accepted(proposal, counts, path, bonus, looked_at.sum(dim=1))


@dataclass(frozen=True)
class _Fixed:
    """Shared tensors of batches of one shape. Read-only."""

    counts: Tensor
    path: Tensor
    no_draws: Tensor


@lru_cache(maxsize=256)
def _chains(size: int, num_nodes: int, device: torch.device) -> _Fixed:
    path = torch.arange(num_nodes, device=device).expand(size, -1).contiguous()
    no_draws = torch.zeros(size, dtype=torch.int64, device=device)
    return _Fixed(torch.ones_like(no_draws), path, no_draws)


def _roots(size: int, device: torch.device) -> _Fixed:
    return _chains(size, 1, device)


def _accepted_nodes(proposal: Proposal, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``counts`` and ``path`` of trees whose nodes pass where ``right`` bool [B, T]."""
    nodes = torch.arange(right.shape[1], device=right.device)
    wrong = ~right & (nodes > 0)
    accepted = ~(proposal.mask & wrong[:, None]).any(dim=2)
    path = torch.where(accepted, nodes, nodes + len(nodes)).argsort(dim=1)
    return accepted.sum(dim=1), path[:, : proposal.tree.depth + 1]


def _accepted(
    proposal: Proposal, counts: Tensor, path: Tensor, target_ids: Tensor, draws: Tensor
) -> AcceptedPaths:
    """Build the result from ``path``, whose first ``counts`` nodes are accepted."""
    place = torch.arange(path.shape[1], device=path.device)
    last = target_ids.gather(1, path.gather(1, counts[:, None] - 1))
    following = proposal.tokens.gather(1, path).roll(-1, dims=1)
    tokens = torch.where(place == counts[:, None] - 1, last, following)
    return AcceptedPaths(counts, tokens, path, last[:, 0], draws, target_ids)
