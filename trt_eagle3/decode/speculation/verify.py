"""Verification: accept paths of a batch of trees from the target's logits at their nodes.

Shapes: B sequences of a padded batch, n sequences with the same filters, T tree nodes, V vocab.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from enum import Enum
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional

from trt_eagle3.decode.sampling.logits_process import AllowedTokens, changed_logits
from trt_eagle3.decode.sampling.sampler import Sampler, agreeing, verify_results
from trt_eagle3.decode.speculation.accept import (
    NO_TOKEN,
    AcceptedPaths,
    accept_greedy,
    accept_sampled,
    greedy_tokens,
)
from trt_eagle3.decode.speculation.proposal import Proposal
from trt_eagle3.decode.speculation.tree_masks import TreeMasks
from trt_eagle3.engine.runtime.session import Reduction
from trt_eagle3.host_copy import to_device

__all__ = ["LogitsForm", "take_draws", "verify", "logits_form_of"]

_MOST_PROBS = 1 << 24  # most probabilities in memory at once: 128 MiB of float64


class LogitsForm(Enum):
    """The form of the target's logits that a step needs."""

    TOKENS = "the likeliest token of each row"
    COMPUTED = "logits of the type in which they were computed"
    FLOAT32 = "logits in float32"

    @property
    def reduction(self) -> Reduction | None:
        """The reduction to run within the target's graph; None: no reduction."""
        return _REDUCTIONS[self]


_REDUCTIONS = {
    LogitsForm.TOKENS: Reduction("greedy tokens", greedy_tokens),
    LogitsForm.COMPUTED: Reduction("as computed", lambda logits: logits),
    LogitsForm.FLOAT32: None,
}


def logits_form_of(samplers: Sequence[Sampler]) -> LogitsForm:
    """Return the form of logits that suffices for all of ``samplers``."""
    every = [s.sampling for s in samplers]
    if not all(s.greedy and s.logprobs is None for s in every):
        return LogitsForm.FLOAT32
    return LogitsForm.COMPUTED if any(s.changes_logits for s in every) else LogitsForm.TOKENS


def verify(
    logits_form: LogitsForm,
    samplers: Sequence[Sampler],
    proposal: Proposal,
    reduced: Tensor,
    masks: TreeMasks,
) -> AcceptedPaths:
    """Verify the tree of each sequence.

    Args:
        samplers: of the sequences, the first rows of the batch.
        reduced: the output that ``logits_form`` names: int64 [B, T] tokens or [B, T, V] logits.
        masks: of ``proposal``, created before the target ran.
    """
    match logits_form:
        case LogitsForm.TOKENS:
            return accept_greedy(proposal, reduced)
        case LogitsForm.COMPUTED:
            return accept_greedy(proposal, _chosen_tokens(samplers, proposal, reduced, masks))
        case LogitsForm.FLOAT32:
            return _sampled_paths(samplers, proposal, reduced, masks)


def take_draws(sampler: Sampler, count: int) -> None:
    """Consume ``count`` random numbers of the walk, and the bonus token's."""
    if not sampler.sampling.greedy:
        sampler.skip(1 + count)


def _chosen_tokens(
    samplers: Sequence[Sampler], proposal: Proposal, logits: Tensor, masks: TreeMasks
) -> Tensor:
    """Return the greedy token after each node, int64 [B, T]; ``logits`` [B, T, V]: any type."""
    count, device = len(samplers), logits.device
    allowed = masks.compute(logits.shape[2], device)
    first = proposal.on_device().first(count)
    changed = changed_logits(samplers, logits[:count], first.tokens, first.mask)
    found = _allowed_tokens(changed, allowed) if allowed else greedy_tokens(changed)
    return functional.pad(found, (0, 0, 0, len(logits) - count))


def _allowed_tokens(logits: Tensor, allowed: AllowedTokens) -> Tensor:
    """Return ``greedy_tokens`` of ``logits`` [B, T, V] without forbidden tokens.

    Only the logits of nodes with a mask are copied.
    """
    places = allowed.places(logits.shape[1])
    kept = allowed.mask_(logits.flatten(0, 1).index_select(0, places))
    found = greedy_tokens(logits)
    return found.flatten().index_copy_(0, places, greedy_tokens(kept)).view_as(found)


def _sampled_paths(
    samplers: Sequence[Sampler], proposal: Proposal, logits: Tensor, masks: TreeMasks
) -> AcceptedPaths:
    """Verify trees of sequences that sample, from ``logits`` f32 [B, T, V].

    Random numbers are not consumed before ``take_draws``, because a step may be discarded.
    """
    count, (size, num_nodes) = len(samplers), proposal.tokens.shape
    pruned = proposal.pruned()
    draws = [
        [0.0] * (1 + num_nodes) if s.sampling.greedy else s.upcoming(1 + num_nodes)
        for s in samplers
    ]
    accept_probs, bonus = _accept_probabilities(
        samplers, pruned.first(count), logits[:count], masks, [d[0] for d in draws]
    )
    flat = torch.tensor([*chain.from_iterable(d[1:] for d in draws)], dtype=torch.float64)
    uniform = to_device(flat.view(count, num_nodes), logits.device)
    padding = (0, 0, 0, size - count)
    fields = [functional.pad(field, padding) for field in (accept_probs, bonus, uniform)]
    return accept_sampled(pruned, *fields)


def _accept_probabilities(
    samplers: Sequence[Sampler],
    proposal: Proposal,
    logits: Tensor,
    masks: TreeMasks,
    draws: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Return accept probabilities and bonus tokens of a batch.

    Args:
        proposal: ``pruned``. logits: f32 [B, T, V].
        draws: a random number of each sequence, for its bonus token.
    Returns:
        float64 [B, T]: the target's probability of a node's token after its parent.
        int64 [B, T]: the token to emit where the walk ends.
    """
    device, tokens, parents = logits.device, proposal.tokens, proposal.parents
    best, bonus = logits.max(dim=-1)
    allowed = masks.compute(logits.shape[2], device)
    accept_probs = agreeing(tokens, parents, bonus).double()
    for alike in _alike(samplers, tokens.shape[1] * logits.shape[2]):
        index = to_device(torch.tensor(alike), device)
        values, drafted, above, mask = (
            t.index_select(0, index) for t in (logits, tokens, parents, proposal.mask)
        )
        drawn = proposal.drawn
        found = verify_results(
            [samplers[i] for i in alike],
            values,
            drafted,
            above,
            mask,
            allowed.select(alike) if allowed else None,
            [draws[i] for i in alike],
            None if drawn is None else (drawn.ids[index], drawn.probs[index]),
        )
        accept_probs[index], bonus[index] = found.accept, found.bonus
    bonus = bonus.masked_fill(~best.isfinite(), NO_TOKEN)
    dropped = proposal.dropped()
    if dropped is None:
        return accept_probs, bonus
    return accept_probs.masked_fill(dropped, 0.0), bonus.masked_fill(dropped, 0)


def _alike(samplers: Sequence[Sampler], num_probs: int) -> Iterator[list[int]]:
    """Group sequences that need probabilities by their filters, for verification in one batch.

    ``num_probs``: probabilities per sequence. It bounds the size of a group.
    """
    alike: dict[Hashable, list[int]] = {}
    for i, sampler in enumerate(samplers):
        if sampler.needs_probs:
            alike.setdefault(sampler.sampling.filters, []).append(i)
    most = max(_MOST_PROBS // num_probs, 1)
    for rows in alike.values():
        yield from (rows[start : start + most] for start in range(0, len(rows), most))
