"""Verifying: from the target's logits at the nodes of every tree to what each sequence says.

Shapes: B sequences, T nodes, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trt_eagle3.decode.accept import Accepted, accept
from trt_eagle3.decode.propose import Proposal
from trt_eagle3.decode.sequence import SequenceState

__all__ = ["judge"]

_NO_TOKEN = -1


def judge(
    sequences: Sequence[SequenceState], proposal: Proposal, logits: Tensor, counts: Sequence[int]
) -> list[Accepted]:
    """What each sequence says, from ``logits`` f32 [B, T, V] of its first ``counts`` nodes.

    Nothing at all where a logit is no number. The host waits for the device here, once.
    """
    tokens, parents = (t.to(logits.device, non_blocking=True) for t in (proposal.tokens, proposal.parents))
    best, bonus = logits.max(dim=-1)
    chances = None
    for i, (s, count) in enumerate(zip(sequences, counts, strict=True)):
        if s.sampler.needs_probs:
            chances = torch.zeros(bonus.shape, dtype=torch.float64, device=bonus.device) if chances is None else chances
            mask = proposal.mask[i, :count, :count]
            verdict = s.sampler.verdict(logits[i, :count], tokens[i, :count], parents[i, :count], mask)
            chances[i, :count], bonus[i, :count] = verdict.accept, verdict.bonus
    known = torch.stack([tokens, parents, bonus.masked_fill(~best.isfinite(), _NO_TOKEN)])
    rows = known.tolist() if chances is None else torch.cat([known.double(), chances[None]]).tolist()
    found = []
    for i, (s, count) in enumerate(zip(sequences, counts, strict=True)):
        drafted, above, said = ([int(value) for value in row[i][:count]] for row in rows[:3])
        if _NO_TOKEN in said:
            found.append(Accepted((0,), ()))
            continue
        certain = [float(said[parent] == token) for token, parent in zip(drafted, above, strict=True)]
        probs = rows[3][i] if s.sampler.needs_probs else certain
        found.append(accept(drafted, above, probs, said, s.sampler.uniform))
    return found
