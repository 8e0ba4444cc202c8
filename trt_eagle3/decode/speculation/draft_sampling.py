"""DraftSampling: draw drafted tokens at random, on the device.

A block draft gives a distribution for every row, and its tokens are drawn from it. Verification
needs that distribution, so it has few possible tokens: the draft's likeliest ones.

The random number of a token depends only on the request's seed and the token's sequence index. So
an answer does not depend on the batch, and the host need not know how many tokens were accepted. A
number may be used again for the same index in a later step. No emitted token depends on its first
use: that draft was not reached.

Shapes: B sequences, R drafted tokens of each, V ids that may be drafted, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.host_copy import to_device

__all__ = ["DraftSampling"]

_CANDIDATES = (
    64  # likeliest tokens of a row that may be drawn; more would be copied, but rarely win
)
# SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014)
_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_MANTISSA = 53  # bits of a float64


@dataclass(frozen=True)
class DraftSampling:
    """How each sequence of a batch draws its drafts.

    Attributes:
        temperature: float64 [B]; 0: the likeliest token. top_k: int64 [B]; 0: all. top_p: float64
            [B]. seeds: int64 [B].
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor

    @classmethod
    def of(
        cls, samplers: Sequence[Sampler | None], size: int, device: torch.device
    ) -> DraftSampling | None:
        """Make it for the ``samplers`` of a batch of ``size`` rows; None if all are greedy.

        None in ``samplers``, and padding, are greedy.
        """
        drawn = [(i, s) for i, s in enumerate(samplers) if s is not None and not s.sampling.greedy]
        if not drawn:
            return None
        numbers = torch.zeros(3, size, dtype=torch.float64)
        seeds = torch.zeros(size, dtype=torch.int64)
        for i, s in drawn:
            p = s.sampling
            numbers[:, i] = torch.tensor([p.temperature, p.top_k, p.top_p], dtype=torch.float64)
            seeds[i] = s.draft_seed
        temperature, top_k, top_p = to_device(numbers, device)
        return cls(temperature, top_k.long(), top_p, to_device(seeds, device))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> DraftSampling:
        """Apply ``change``, which selects sequences, to every tensor."""
        fields = (self.temperature, self.top_k, self.top_p, self.seeds)
        return DraftSampling(*(change(field) for field in fields))

    def draw(self, logits: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw a token of each row.

        Args:
            logits: f32 [B, R, V]. indices: int64 [B, R] sequence index of the drafted tokens.
        Returns:
            int64 [B, R]: the tokens; int64 [B, R, K] candidates; float64 [B, R, K]: their
            probabilities.
        """
        best = logits.topk(min(_CANDIDATES, logits.shape[2]), dim=2)
        probs = self._probs(best.values)
        places = _first_reaching(probs, self._uniform(indices))
        return best.indices.gather(2, places[..., None])[..., 0], best.indices, probs

    def _probs(self, logits: Tensor) -> Tensor:
        """Return probabilities float64 [B, R, K] of ``logits`` f32 [B, R, K], descending."""
        temperature, top_k, top_p = (
            field[:, None, None] for field in (self.temperature, self.top_k, self.top_p)
        )
        greedy = temperature == 0
        places = torch.arange(logits.shape[2], device=logits.device)
        apart = (logits.double() - logits[..., :1].double()) / torch.where(greedy, 1.0, temperature)
        weights = apart.nan_to_num(nan=-torch.inf).exp()
        weights = weights * ((top_k == 0) | (places < top_k))
        before = (weights.cumsum(2) - weights) / weights.sum(2, keepdim=True)
        kept = torch.where(greedy, places == 0, (before < top_p) | (places == 0))
        weights = torch.where(kept, weights, 0.0)
        weights[..., 0].clamp_(min=torch.finfo(torch.float64).tiny)  # a row without a finite logit
        return weights / weights.sum(2, keepdim=True)

    def _uniform(self, indices: Tensor) -> Tensor:
        """Return a random number in [0, 1) of each index, float64 [B, R]."""
        mixed = _mixed(_mixed(self.seeds)[:, None] + indices * _GOLDEN)
        return _shifted(mixed, 64 - _MANTISSA).double() * 2.0**-_MANTISSA


def _first_reaching(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the inverse of the cumulated ``probs`` [..., K] at ``uniform`` [...], int64 [...]."""
    reached = (probs.cumsum(-1) <= uniform[..., None]).sum(-1)
    last = (probs > 0).sum(-1) - 1  # rounding must not go past the last possible token
    return torch.minimum(reached, last)


def _mixed(bits: Tensor) -> Tensor:
    """Mix the bits of int64 numbers (SplitMix64)."""
    bits = (bits ^ _shifted(bits, 30)) * _MIX_1
    bits = (bits ^ _shifted(bits, 27)) * _MIX_2
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shift to the right, with zeros from the left."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
