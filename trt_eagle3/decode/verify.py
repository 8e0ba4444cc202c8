"""Verifying: from the target's logits at the nodes of every tree to what each sequence says.

Shapes: B sequences, T nodes, V vocab.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from trt_eagle3.decode.accept import Accepted, accept
from trt_eagle3.decode.propose import Proposal
from trt_eagle3.decode.sampling import verify_results
from trt_eagle3.decode.sequence import SequenceState

__all__ = ["verify_tree"]

_NO_TOKEN = -1
_MOST_PROBS = 1 << 24  # at once: 128 MiB of float64


def verify_tree(
    sequences: Sequence[SequenceState], proposal: Proposal, logits: Tensor, counts: Sequence[int]
) -> list[Accepted]:
    """What each sequence says, from ``logits`` f32 [B, T, V] of its first ``counts`` nodes.

    Nothing at all where a logit is no number. The host waits for the device here, once.
    """
    tokens, parents = (
        t.to(logits.device, non_blocking=True) for t in (proposal.tokens, proposal.parents)
    )
    best, bonus = logits.max(dim=-1)
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
            [sequences[i].sampler for i in alike], values, drafted, above, mask
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
    found = []
    for i, (s, count) in enumerate(zip(sequences, counts, strict=True)):
        nodes, parent_of, output_ids = (
            [int(value) for value in row[i][:count]] for row in fields[:3]
        )
        if _NO_TOKEN in output_ids:
            found.append(Accepted((0,), ()))
            continue
        certain = [
            float(output_ids[parent] == token)
            for token, parent in zip(nodes, parent_of, strict=True)
        ]
        probs = fields[3][i] if s.sampler.needs_probs else certain
        found.append(accept(nodes, parent_of, probs, output_ids, s.sampler.uniform))
    return found


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
