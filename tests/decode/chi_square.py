"""Pearson's test of counts against exact probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FALSE_ALARM", "p_value"]

FALSE_ALARM = 1e-5
"""How often one test of an exact sampler fails by chance. There are fewer than 100 of them, and
their seeds are fixed: one that passed will pass again."""

# the usual condition for the chi-square approximation; rarer cells are counted together
_LEAST_EXPECTED = 5.0


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Of ``counts`` int64 (any shape) under ``probs`` float64 of the same shape; 0 where
    something impossible came.
    """
    counts, probs = counts.flatten().double(), probs.flatten()
    assert abs(float(probs.sum()) - 1.0) < 1e-9
    if bool((counts[probs == 0] > 0).any()):
        return 0.0
    expected = probs * counts.sum()
    rare = expected < _LEAST_EXPECTED
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    if wanted[-1] < _LEAST_EXPECTED:  # still too rare: with the rarest of the others
        seen, wanted = seen[wanted.argsort()], wanted[wanted.argsort()]
        seen = torch.cat([seen[:2].sum()[None], seen[2:]])
        wanted = torch.cat([wanted[:2].sum()[None], wanted[2:]])
    if len(wanted) == 1:
        return 1.0
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
