"""Verifying: from the target's logits at the nodes of every tree to what each sequence says.

Shapes: B sequences, T nodes, V vocab.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from trt_eagle3.decode.accept import Accepted, accept
from trt_eagle3.decode.propose import Proposal
from trt_eagle3.decode.sampling import verdicts
from trt_eagle3.decode.sequence import SequenceState

__all__ = ["judge"]

_NO_TOKEN = -1
_MOST_PROBS = 1 << 24  # at once: 128 MiB of float64


def judge(
    sequences: Sequence[SequenceState], proposal: Proposal, logits: Tensor, counts: Sequence[int]
) -> list[Accepted]:
    """What each sequence says, from ``logits`` f32 [B, T, V] of its first ``counts`` nodes.

    Nothing at all where a logit is no number. The host waits for the device here, once.
    """
    tokens, parents = (t.to(logits.device, non_blocking=True) for t in (proposal.tokens, proposal.parents))
    best, bonus = logits.max(dim=-1)
    chances = None
    for alike, count in _alike(sequences, counts, logits.shape[2]):
        chances = torch.zeros(bonus.shape, dtype=torch.float64, device=bonus.device) if chances is None else chances
        index = torch.tensor(alike).to(logits.device, non_blocking=True)
        values, drafted, above = (t[:, :count].index_select(0, index) for t in (logits, tokens, parents))
        mask = proposal.mask[:, :count, :count].to(logits.device, non_blocking=True).index_select(0, index)
        verdict = verdicts([sequences[i].sampler for i in alike], values, drafted, above, mask)
        chances[index, :count], bonus[index, :count] = verdict.accept, verdict.bonus
    known = torch.stack([tokens, parents, bonus.masked_fill(~best.isfinite(), _NO_TOKEN)])
    fields = known.tolist() if chances is None else torch.cat([known.double(), chances[None]]).tolist()
    found = []
    for i, (s, count) in enumerate(zip(sequences, counts, strict=True)):
        nodes, parent_of, said = ([int(value) for value in row[i][:count]] for row in fields[:3])
        if _NO_TOKEN in said:
            found.append(Accepted((0,), ()))
            continue
        certain = [float(said[parent] == token) for token, parent in zip(nodes, parent_of, strict=True)]
        probs = fields[3][i] if s.sampler.needs_probs else certain
        found.append(accept(nodes, parent_of, probs, said, s.sampler.uniform))
    return found


def _alike(
    sequences: Sequence[SequenceState], counts: Sequence[int], vocab_size: int
) -> Iterator[tuple[list[int], int]]:
    """Those that need probabilities and can be judged together, and their count: of the same filters and count."""
    alike: dict[Hashable, list[int]] = {}
    for i, (s, count) in enumerate(zip(sequences, counts, strict=True)):
        if s.sampler.needs_probs:
            alike.setdefault((count, s.sampler.sampling.filters), []).append(i)
    for rows in alike.values():
        count = counts[rows[0]]
        most = max(_MOST_PROBS // (count * vocab_size), 1)
        yield from ((rows[start : start + most], count) for start in range(0, len(rows), most))
