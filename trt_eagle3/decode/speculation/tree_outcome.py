"""Verifying the trees of a batch on the device, whoever samples: what the target makes of every
node, and what of it is accepted.

Shapes: B sequences of a padded batch, T tree nodes, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional

from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.sampling.logits_process import AllowedTokens, changed_logits
from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.decode.speculation.accept import agreeing
from trt_eagle3.decode.speculation.outcome import (
    Outcome,
    accept_drawn,
    accept_trees,
    greedy_tokens,
    on_device,
)
from trt_eagle3.decode.speculation.propose import Proposal
from trt_eagle3.decode.speculation.tree import AnyTree
from trt_eagle3.decode.speculation.tree_masks import TreeMasks
from trt_eagle3.decode.speculation.verify import accept_probabilities
from trt_eagle3.engine.session import Reduction
from trt_eagle3.host_copy import to_device

__all__ = ["gives_tokens", "reduction", "take_draws", "tree_outcome"]


def reduction(sequences: Sequence[SequenceState]) -> Reduction | None:
    """What the target is to make of logits: tokens, where the likeliest of the raw ones is all that
    any wants of a node; themselves as they were computed, where all are greedy; None: float32.
    """
    if not all(s.sampling.greedy and s.sampling.logprobs is None for s in sequences):
        return None
    changing = any(s.sampling.changes_logits for s in sequences)
    return _as_computed if changing else greedy_tokens


def _as_computed(logits: Tensor) -> Tensor:
    """``logits``, which are spared the way to float32."""
    return logits


def gives_tokens(reduce: Reduction | None) -> bool:
    """Whether a ``reduction`` leaves nothing to be chosen."""
    return reduce is not None and reduce is not _as_computed


def tree_outcome(
    reduce: Reduction | None,
    sequences: Sequence[SequenceState],
    tree: AnyTree,
    proposal: Proposal,
    reduced: Tensor,
    masks: TreeMasks,
) -> Outcome:
    """What ``sequences``, the first rows of a batch, accept of trees of ``tree``; ``reduced``: what
    ``reduce``, their ``reduction``, has made of logits [B, T, V].
    """
    if reduce is None:
        return _drawn_outcome(sequences, tree, proposal, reduced, masks)
    if not gives_tokens(reduce):
        reduced = _chosen_tokens([s.sampler for s in sequences], tree, proposal, reduced, masks)
    return accept_trees(tree, proposal, reduced)


def _chosen_tokens(
    samplers: Sequence[Sampler],
    tree: AnyTree,
    proposal: Proposal,
    logits: Tensor,
    masks: TreeMasks,
) -> Tensor:
    """int64 [B, T]: the token to emit after each node, from ``logits`` [B, T, V] (any type)."""
    count, device = len(samplers), logits.device
    allowed = masks.compute(logits.shape[2], device)
    placed = on_device(tree, proposal, device)
    changed = changed_logits(samplers, logits[:count], placed.tokens[:count], placed.mask[:count])
    found = _allowed_tokens(changed, allowed) if allowed else greedy_tokens(changed)
    return functional.pad(found, (0, 0, 0, len(logits) - count))


def _allowed_tokens(logits: Tensor, allowed: AllowedTokens) -> Tensor:
    """``greedy_tokens`` of ``logits`` [B, T, V], forbidden ones left out; only the logits of nodes
    with a mask are copied.
    """
    places = allowed.places(logits.shape[1])
    kept = allowed.mask_(logits.flatten(0, 1).index_select(0, places))
    found = greedy_tokens(logits)
    return found.flatten().index_copy_(0, places, greedy_tokens(kept)).view_as(found)


def _drawn_outcome(
    sequences: Sequence[SequenceState],
    tree: AnyTree,
    proposal: Proposal,
    logits: Tensor,
    masks: TreeMasks,
) -> Outcome:
    """What ``sequences``, the first rows of ``logits`` f32 [B, T, V], accept of trees of ``tree``.

    Their random numbers stay the next ones until ``take_draws``: a step may be forgotten.
    """
    count, (size, num_nodes) = len(sequences), proposal.tokens.shape
    placed = on_device(tree, proposal, logits.device)
    first = Proposal(**{name: field[:count] for name, field in vars(placed).items()})
    # whoever samples, and is followed by no draft, emits the same with and without others' trees
    nodes = [num_nodes if s.drafting or s.sampling.greedy else 1 for s in sequences]
    draws = [
        [0.0] * (1 + num_nodes) if s.sampling.greedy else s.sampler.upcoming(1 + num_nodes)
        for s in sequences
    ]
    found = accept_probabilities(
        [s.sampler for s in sequences], first, logits[:count], nodes, masks, [d[0] for d in draws]
    )
    accept_probs = found.accept_probs
    if accept_probs is None:
        accept_probs = agreeing(first.tokens, first.parents, found.bonus).double()
    flat = torch.tensor([*chain.from_iterable(d[1:] for d in draws)], dtype=torch.float64)
    uniform = to_device(flat.view(count, num_nodes), logits.device)
    padding = (0, 0, 0, size - count)
    return accept_drawn(
        placed, *(functional.pad(field, padding) for field in (accept_probs, found.bonus, uniform))
    )


def take_draws(sequence: SequenceState, count: int) -> None:
    """``sequence`` goes on by a step that used ``count`` random numbers and its bonus token's."""
    if not sequence.sampling.greedy:
        sequence.sampler.skip(1 + count)
