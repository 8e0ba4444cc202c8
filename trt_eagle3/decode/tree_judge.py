"""How trees are judged on the device: the target's choice at every node, and what that accepts.

Shapes: B sequences of a padded batch, T tree nodes, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trt_eagle3.decode.logits_process import AllowedTokens, changed_logits, forbidden_tokens
from trt_eagle3.decode.outcome import greedy_tokens, tree_shape
from trt_eagle3.decode.propose import Proposal
from trt_eagle3.decode.sampling import Sampler
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.decode.transfer import to_device
from trt_eagle3.decode.tree import AnyTree, Tree
from trt_eagle3.decode.tree_masks import TreeMasks
from trt_eagle3.engine.session import Reduction

__all__ = ["all_greedy", "any_changing", "chosen_tokens", "first_trees", "reduction"]


def all_greedy(sequences: Sequence[SequenceState]) -> bool:
    """Whether the device can accept: what each says is the likeliest token, and all it says."""
    return all(s.sampling.greedy and s.sampling.logprobs is None for s in sequences)


def any_changing(sequences: Sequence[SequenceState]) -> bool:
    """Whether penalties, biases or grammars change what the target says of any."""
    return any(s.sampling.changes_logits for s in sequences)


def chosen_tokens(
    samplers: Sequence[Sampler],
    tree: AnyTree,
    proposal: Proposal,
    logits: Tensor,
    masks: TreeMasks,
) -> Tensor:
    """int64 [B, T]: the token to be said after each node, from ``logits`` [B, T, V] (any type) of
    which the first rows are those of ``samplers``.
    """
    count, device = len(samplers), logits.device
    mask = tree_shape(tree, device).mask.expand(count, -1, -1) if isinstance(tree, Tree) else None
    mask = proposal.mask[:count] if mask is None else mask
    allowed = masks.compute(logits.shape[2], device)
    tokens = proposal.tokens[:count].to(device, non_blocking=True)
    changed = changed_logits(samplers, logits[:count], tokens, mask)
    found = _allowed_tokens(changed, allowed) if allowed else greedy_tokens(changed)
    return torch.cat([found, found.new_zeros(len(logits) - count, found.shape[1])])


def _allowed_tokens(logits: Tensor, allowed: AllowedTokens) -> Tensor:
    """``greedy_tokens`` of ``logits`` [B, T, V], forbidden ones left out; only the logits of those
    with a grammar are copied.
    """
    forbidden = forbidden_tokens(allowed.bits, logits.shape[2])
    if len(allowed.rows) == len(logits):
        return greedy_tokens(logits.masked_fill(forbidden, -torch.inf))
    rows = to_device(torch.tensor(list(allowed.rows)), logits.device)
    theirs = logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf)
    return greedy_tokens(logits).index_copy_(0, rows, greedy_tokens(theirs))


def reduction(*, changing: bool) -> Reduction:
    """What the target is to make of greedy sequences' logits: tokens, or the logits themselves
    where those are ``changing`` that tokens are chosen by.
    """
    return _as_computed if changing else greedy_tokens


def _as_computed(logits: Tensor) -> Tensor:
    """``logits``, which are spared the way to float32."""
    return logits


def first_trees(proposal: Proposal, count: int) -> Proposal:
    """The trees of the first ``count`` sequences."""
    return Proposal(**{name: field[:count] for name, field in vars(proposal).items()})
