"""Log-probabilities of emitted tokens, from the target's raw distribution at their path's nodes.

Raw: ``log_softmax`` of the target's logits before bias, penalties, grammar, temperature and
filters (vLLM's ``raw_logprobs``).

Shapes: B sequences, T tree nodes, D nodes of the deepest path, V vocab, n emitted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.host_copy import Readback

__all__ = ["LogprobsReadback", "TokenLogprob", "packed_logprobs", "token_logprobs"]


@dataclass(frozen=True)
class TokenLogprob:
    """The target's log-probability of an emitted token (``SamplingParams.logprobs``).

    Attributes:
        logprob: natural logarithm, of the raw distribution.
        top: token ids and log-probabilities of the likeliest tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class LogprobsReadback:
    """Copies the log-probabilities of a step's tokens to the host."""

    def __init__(
        self, num_best: Sequence[int | None], logits: Tensor, path: Tensor, tokens: Tensor
    ) -> None:
        """Start the copies.

        Args:
            num_best: number of likeliest tokens that each sequence wants, in addition to the
                emitted one; None: no log-probabilities.
            logits: f32 [B, T, V]; the sequences are its first rows.
            path, tokens: int64 [B, D]: nodes and emitted tokens.
        """
        self._found = {
            i: Readback(packed_logprobs(logits[i].index_select(0, path[i]), tokens[i], most))
            for i, most in enumerate(num_best)
            if most is not None
        }

    def wait(self, row: int, count: int) -> tuple[TokenLogprob, ...]:
        """Return those of the first ``count`` tokens at ``row``; empty if the row wants none."""
        values = self._found.get(row)
        return () if values is None else tuple(_unpacked(values.wait()[:count]))


def token_logprobs(logits: Tensor, tokens: Tensor, num_best: int) -> list[TokenLogprob]:
    """Return the log-probabilities of ``tokens`` int64 [n], and of the ``num_best`` likeliest.

    ``logits``: f32 [n, V].
    """
    return _unpacked(packed_logprobs(logits, tokens, num_best).tolist())


def packed_logprobs(logits: Tensor, tokens: Tensor, num_best: int) -> Tensor:
    """Return float64 [n, 2 + 2 k]: token, its log-probability, the k best ones, their tokens."""
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
