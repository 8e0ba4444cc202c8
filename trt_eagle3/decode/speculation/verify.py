"""Verifying: from the target's logits at the nodes of every tree to what each sequence accepts.

Shapes: B sequences, T nodes, V vocab.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.sampling.logprobs import path_logprobs
from trt_eagle3.decode.sampling.sampler import Sampler, verify_results
from trt_eagle3.decode.speculation.accept import Accepted, accept, agreeing
from trt_eagle3.decode.speculation.propose import Proposal
from trt_eagle3.decode.speculation.tree_masks import TreeMasks
from trt_eagle3.host_copy import to_device

__all__ = ["AcceptProbabilities", "accept_probabilities", "verify_tree"]

_NO_TOKEN = -1
_MOST_PROBS = 1 << 24  # at once: 128 MiB of float64


@dataclass(frozen=True)
class AcceptProbabilities:
    """What the target makes of trees, on its device.

    Attributes:
        tokens: int64 [B, T] at the nodes. parents: int64 [B, T].
        accept_probs: float64 [B, T]: the target's probability of a node's token after its parent;
            None where all sequences take the likeliest token of the raw logits.
        bonus: int64 [B, T]: the token to emit where the walk ends, -1 after logits that are no
            numbers.
    """

    tokens: Tensor
    parents: Tensor
    accept_probs: Tensor | None
    bonus: Tensor


def accept_probabilities(
    samplers: Sequence[Sampler],
    proposal: Proposal,
    logits: Tensor,
    counts: Sequence[int],
    masks: TreeMasks,
    draws: Sequence[float],
) -> AcceptProbabilities:
    """Those of the first ``counts`` nodes of every tree, by ``logits`` f32 [B, T, V].

    Args:
        masks: of ``proposal``. draws: a random number of each sequence that samples, for its bonus
            token.
    """
    device = logits.device
    tokens, parents = (t.to(device, non_blocking=True) for t in (proposal.tokens, proposal.parents))
    best, bonus = logits.max(dim=-1)
    allowed = masks.compute(logits.shape[2], device)
    accept_probs = None
    for alike, count in _alike(samplers, counts, logits.shape[2]):
        if accept_probs is None:
            accept_probs = agreeing(tokens, parents, bonus).double()
        index = to_device(torch.tensor(alike), device)
        values, drafted, above = (
            t[:, :count].index_select(0, index) for t in (logits, tokens, parents)
        )
        mask = proposal.mask[:, :count, :count].to(device, non_blocking=True).index_select(0, index)
        found = verify_results(
            [samplers[i] for i in alike],
            values,
            drafted,
            above,
            mask,
            allowed.select(alike, count) if allowed else None,
            [draws[i] for i in alike],
        )
        accept_probs[index] = 0.0
        accept_probs[index, :count], bonus[index, :count] = found.accept, found.bonus
    return AcceptProbabilities(
        tokens, parents, accept_probs, bonus.masked_fill(~best.isfinite(), _NO_TOKEN)
    )


def verify_tree(
    sequences: Sequence[SequenceState],
    proposal: Proposal,
    logits: Tensor,
    counts: Sequence[int],
    masks: TreeMasks | None = None,
) -> list[Accepted]:
    """What each sequence accepts, by ``logits`` f32 [B, T, V] of its first ``counts`` nodes.

    Nothing at all where a logit is no number. The host waits for the device here, once; twice where
    log-probabilities are wanted. ``masks``: of ``proposal``, begun before the target ran.
    """
    samplers = [s.sampler for s in sequences]
    masks = masks or TreeMasks(samplers, proposal)
    draws = [0.0 if s.sampling.greedy else s.uniform() for s in samplers]
    probabilities = accept_probabilities(samplers, proposal, logits, counts, masks, draws)
    known = torch.stack([probabilities.tokens, probabilities.parents, probabilities.bonus])
    fields = (
        known.tolist()
        if probabilities.accept_probs is None
        else torch.cat([known.double(), probabilities.accept_probs[None]]).tolist()
    )
    found = [
        _accepted(s, [row[i][:count] for row in fields])
        for i, (s, count) in enumerate(zip(sequences, counts, strict=True))
    ]
    return path_logprobs(sequences, found, logits)


def _accepted(sequence: SequenceState, fields: Sequence[Sequence[float]]) -> Accepted:
    """What one sequence accepts: of its nodes the tokens, parents and bonus tokens, and where there
    are any, accept probabilities.
    """
    nodes, parents, output_ids = ([int(value) for value in row] for row in fields[:3])
    if _NO_TOKEN in output_ids or sequence.sampler.error:
        return Accepted((0,), ())
    if len(fields) > 3:
        probs: Sequence[float] = fields[3]
    else:
        pairs = zip(nodes, parents, strict=True)
        probs = [float(output_ids[parent] == token) for token, parent in pairs]
    return accept(nodes, parents, probs, output_ids, sequence.sampler.uniform)


def _alike(
    samplers: Sequence[Sampler], counts: Sequence[int], vocab_size: int
) -> Iterator[tuple[list[int], int]]:
    """Those that need probabilities and can be verified together, and their count: of the same
    filters and count.
    """
    alike: dict[Hashable, list[int]] = {}
    for i, (s, count) in enumerate(zip(samplers, counts, strict=True)):
        if s.needs_probs:
            alike.setdefault((count, s.sampling.filters), []).append(i)
    for rows in alike.values():
        count = counts[rows[0]]
        most = max(_MOST_PROBS // (count * vocab_size), 1)
        yield from ((rows[start : start + most], count) for start in range(0, len(rows), most))
