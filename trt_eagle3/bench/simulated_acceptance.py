"""Drafts that are right by chance, so that speculation can be timed where no trained draft is: a
pair of random weights agrees about nothing.

Only benchmarks import this, and what is generated under it means nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from trt_eagle3.decode import async_cycle, verify
from trt_eagle3.decode.accept import Accepted, accept
from trt_eagle3.decode.outcome import Outcome, accept_greedy
from trt_eagle3.decode.propose import Proposal

__all__ = ["acceptance_length", "acceptance_rate", "simulated_acceptance"]


def acceptance_length(rate: float, steps: int) -> float:
    """Mean tokens of a cycle over a chain of ``steps`` tokens, each accepted at ``rate`` where the
    one before was; the bonus token included.
    """
    return float(sum(rate**depth for depth in range(steps + 1)))


def acceptance_rate(length: float, steps: int) -> float:
    """The rate at which a chain of ``steps`` has the acceptance length ``length``, from 1 to
    ``steps + 1``.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if acceptance_length(middle, steps) < length:
            low = middle
        else:
            high = middle
    return high


@contextmanager
def simulated_acceptance(rate: float, *, seed: int = 0) -> Iterator[None]:
    """Accept every drafted token of a chain with probability ``rate``, whatever the target says, on
    the host and on the device.
    """
    chance = random.Random(seed)

    def on_host(
        tokens: Sequence[int],
        parents: Sequence[int],
        probs: Sequence[float],
        bonus: Sequence[int],
        uniform: Callable[[], float],
    ) -> Accepted:
        del uniform
        return accept(tokens, parents, [rate] * len(probs), bonus, chance.random)

    def on_device(proposal: Proposal, target_ids: Tensor, *, chain: bool) -> Outcome:
        assert chain, "acceptance is simulated for chains"
        right = torch.rand(target_ids[:, 1:].shape, device=target_ids.device) < rate
        agreed = torch.where(right, proposal.tokens[:, 1:], target_ids[:, :-1])
        return accept_greedy(proposal, torch.cat([agreed, target_ids[:, -1:]], 1), chain=chain)

    with (
        patch(f"{verify.__name__}.accept", on_host),
        patch(f"{async_cycle.__name__}.accept_greedy", on_device),
    ):
        yield
