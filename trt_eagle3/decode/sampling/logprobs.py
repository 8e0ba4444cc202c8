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

from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.request.request import TokenLogprob
from trt_eagle3.decode.speculation.accept import Accepted
from trt_eagle3.host_copy import Readback, to_device

__all__ = ["LogprobsAhead", "path_logprobs", "token_logprobs"]


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


class LogprobsAhead:
    """Log-probabilities of what a pass says, on their way to the host with it."""

    def __init__(
        self, sequences: Sequence[SequenceState], logits: Tensor, path: Tensor, tokens: Tensor
    ) -> None:
        """``sequences``: the first rows of ``logits`` f32 [B, T, V]; ``path``, ``tokens`` int64
        [B, T]: as of their outcome.
        """
        rows = [i for i, s in enumerate(sequences) if s.sampling.logprobs is not None]
        counts = [s.sampling.logprobs or 0 for s in sequences]
        self._counts = {i: counts[i] for i in rows}
        self._found = [
            Readback(_packed(logits[i].index_select(0, path[i]), tokens[i], counts[i]))
            for i in rows
        ]

    def wait(self, found: list[Accepted]) -> list[Accepted]:
        """``found``, what the pass says row by row, with the log-probabilities of those who want
        them.
        """
        for (row, _), values in zip(self._counts.items(), self._found, strict=True):
            said = _unpacked(values.wait()[: len(found[row].tokens)])
            found[row] = replace(found[row], logprobs=tuple(said))
        return found


def token_logprobs(logits: Tensor, tokens: Tensor, num_best: int) -> list[TokenLogprob]:
    """Of ``tokens`` int64 [n] after ``logits`` f32 [n, V], with the ``num_best`` likeliest."""
    return _unpacked(_packed(logits, tokens, num_best).tolist())


def _packed(logits: Tensor, tokens: Tensor, num_best: int) -> Tensor:
    """float64 [n, 2 + 2 k]: token, its log-probability, those of the likeliest, and these."""
    values = logits.double()
    values = values - values.logsumexp(dim=1, keepdim=True)
    own = values.gather(1, tokens.clamp(min=0)[:, None])
    best = values.topk(min(num_best, values.shape[1]), dim=1)
    return torch.cat([tokens[:, None].double(), own, best.values, best.indices.double()], dim=1)


def _unpacked(rows: Sequence[Sequence[float]]) -> list[TokenLogprob]:
    found = []
    for token, logprob, *tops in rows:
        half = len(tops) // 2
        pairs = zip(tops[half:], tops[:half], strict=True)
        top = tuple((int(other), value) for other, value in pairs)
        found.append(TokenLogprob(int(token), logprob, top))
    return found


def cut(found: TokenLogprob, count: int) -> TokenLogprob:
    """``found`` with the ``count`` likeliest tokens."""
    return replace(found, top=found.top[:count])
