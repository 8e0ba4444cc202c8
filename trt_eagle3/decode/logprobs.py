"""Log-probabilities of emitted tokens: of the target's own distribution at the nodes of their path.

Raw: ``log_softmax`` of the logits as the target gave them, before bias, penalties, grammar,
temperature and filters (what vLLM calls ``raw_logprobs``).

Shapes: B sequences, T tree nodes, V vocab, n emitted tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trt_eagle3.decode.accept import Accepted
from trt_eagle3.decode.request import TokenLogprob
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.decode.transfer import to_device

__all__ = ["path_logprobs", "token_logprobs"]


def path_logprobs(
    sequences: Sequence[SequenceState], found: Sequence[Accepted], logits: Tensor
) -> list[Accepted]:
    """``found`` with the log-probabilities of those that want them, from ``logits`` f32 [B, T, V];
    the host waits for the device if there are any.
    """
    wanted = [
        (i, node, token)
        for i, (s, accepted) in enumerate(zip(sequences, found, strict=True))
        if s.sampler.sampling.logprobs is not None
        for node, token in zip(accepted.path, accepted.tokens, strict=False)
    ]
    if not wanted:
        return list(found)
    rows = to_device(torch.tensor(wanted), logits.device)
    most = max(s.sampler.sampling.logprobs or 0 for s in sequences)
    values = token_logprobs(logits[rows[:, 0], rows[:, 1]], rows[:, 2], most)
    each = iter(values)
    named = []
    for s, accepted in zip(sequences, found, strict=True):
        count = s.sampler.sampling.logprobs
        if count is not None:
            said = [next(each) for _ in accepted.tokens]
            accepted = replace(accepted, logprobs=tuple(cut(x, count) for x in said))
        named.append(accepted)
    return named


def token_logprobs(logits: Tensor, tokens: Tensor, num_best: int) -> list[TokenLogprob]:
    """Of ``tokens`` int64 [n] after ``logits`` f32 [n, V], with the ``num_best`` likeliest."""
    values = logits.double()
    values = values - values.logsumexp(dim=1, keepdim=True)
    own = values.gather(1, tokens[:, None])
    best = values.topk(min(num_best, values.shape[1]), dim=1)
    packed = torch.cat([tokens[:, None].double(), own, best.values, best.indices.double()], dim=1)
    found = []
    for token, logprob, *tops in packed.tolist():
        half = len(tops) // 2
        pairs = zip(tops[half:], tops[:half], strict=True)
        top = tuple((int(other), value) for other, value in pairs)
        found.append(TokenLogprob(int(token), logprob, top))
    return found


def cut(found: TokenLogprob, count: int) -> TokenLogprob:
    """``found`` with the ``count`` likeliest tokens."""
    return replace(found, top=found.top[:count])
