"""Verifying: from the target's logits at the nodes of every tree to what each sequence says.

Shapes: B sequences, T nodes, V vocab.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from trt_eagle3.decode.accept import Accepted, accept
from trt_eagle3.decode.logprobs import path_logprobs
from trt_eagle3.decode.propose import Proposal
from trt_eagle3.decode.sampling import verify_results
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.decode.tree_masks import TreeMasks

__all__ = ["verify_tree"]

_NO_TOKEN = -1
_MOST_PROBS = 1 << 24  # at once: 128 MiB of float64


def verify_tree(
    sequences: Sequence[SequenceState],
    proposal: Proposal,
    logits: Tensor,
    counts: Sequence[int],
    masks: TreeMasks | None = None,
) -> list[Accepted]:
    """What each sequence says, from ``logits`` f32 [B, T, V] of its first ``counts`` nodes.

    Nothing at all where a logit is no number. The host waits for the device here, once; twice where
    log-probabilities are wanted. ``masks``: of ``proposal``, begun before the target ran.
    """
    masks = masks or TreeMasks([s.sampler for s in sequences], proposal)
    tokens, parents = (
        t.to(logits.device, non_blocking=True) for t in (proposal.tokens, proposal.parents)
    )
    best, bonus = logits.max(dim=-1)
    allowed = masks.compute(logits.shape[2], logits.device)
    accept_probs = None
    for alike, count in _alike(sequences, counts, logits.shape[2]):
        accept_probs = (
            torch.zeros(bonus.shape, dtype=torch.float64, device=bonus.device)
            if accept_probs is None
            else accept_probs
        )
        index = torch.tensor(alike).to(logits.device, non_blocking=True)
        values, drafted, above = (
            t[:, :count].index_select(0, index) for t in (logits, tokens, parents)
        )
        mask = (
            proposal.mask[:, :count, :count]
            .to(logits.device, non_blocking=True)
            .index_select(0, index)
        )
        verify_result = verify_results(
            [sequences[i].sampler for i in alike],
            values,
            drafted,
            above,
            mask,
            allowed.of(alike, count) if allowed else None,
        )
        accept_probs[index, :count], bonus[index, :count] = (
            verify_result.accept,
            verify_result.bonus,
        )
    known = torch.stack([tokens, parents, bonus.masked_fill(~best.isfinite(), _NO_TOKEN)])
    fields = (
        known.tolist()
        if accept_probs is None
        else torch.cat([known.double(), accept_probs[None]]).tolist()
    )
    found = [
        _accepted(s, [row[i][:count] for row in fields])
        for i, (s, count) in enumerate(zip(sequences, counts, strict=True))
    ]
    return path_logprobs(sequences, found, logits)


def _accepted(sequence: SequenceState, fields: Sequence[Sequence[float]]) -> Accepted:
    """What one sequence says: of its nodes the tokens, parents and bonus tokens, and where it has
    them, chances.
    """
    nodes, parents, output_ids = ([int(value) for value in row] for row in fields[:3])
    if _NO_TOKEN in output_ids or sequence.sampler.error:
        return Accepted((0,), ())
    if sequence.sampler.needs_probs:
        probs: Sequence[float] = fields[3]
    else:
        pairs = zip(nodes, parents, strict=True)
        probs = [float(output_ids[parent] == token) for token, parent in pairs]
    return accept(nodes, parents, probs, output_ids, sequence.sampler.uniform)


def _alike(
    sequences: Sequence[SequenceState], counts: Sequence[int], vocab_size: int
) -> Iterator[tuple[list[int], int]]:
    """Those that need probabilities and can be judged together, and their count: of the same
    filters and count.
    """
    alike: dict[Hashable, list[int]] = {}
    for i, (s, count) in enumerate(zip(sequences, counts, strict=True)):
        if s.sampler.needs_probs:
            alike.setdefault((count, s.sampler.sampling.filters), []).append(i)
    for rows in alike.values():
        count = counts[rows[0]]
        most = max(_MOST_PROBS // (count * vocab_size), 1)
        yield from ((rows[start : start + most], count) for start in range(0, len(rows), most))
