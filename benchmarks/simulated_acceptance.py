"""Simulated acceptance, to time speculation without a trained draft.

The drafts of a pair with random weights are never right. Only benchmarks import this module. The
generated tokens have no meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.decode.speculation.accept import AcceptedPaths
from trt_eagle3.decode.speculation.proposal import Proposal
from trt_eagle3.decode.speculation.tree_masks import TreeMasks
from trt_eagle3.decode.speculation.verify import LogitsForm, verify
from trt_eagle3.decode.step import stepper

__all__ = ["acceptance_length", "acceptance_rate", "simulated_acceptance"]


def acceptance_length(rate: float, steps: int) -> float:
    """Return mean tokens of a cycle over a chain of ``steps`` tokens, bonus token included.

    Each token is accepted at ``rate`` if the token before it was accepted.
    """
    return float(sum(rate**depth for depth in range(steps + 1)))


def acceptance_rate(length: float, steps: int) -> float:
    """Return the rate at which a chain of ``steps`` has the acceptance length ``length``.

    ``length``: from 1 to ``steps + 1``.
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
    """Accept every drafted token of a chain with probability ``rate``, whatever the target's
    choice.

    Applies to greedy sequences without penalties, bias or grammar.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def simulated(
        logits_form: LogitsForm,
        samplers: Sequence[Sampler],
        proposal: Proposal,
        reduced: Tensor,
        masks: TreeMasks,
    ) -> AcceptedPaths:
        if logits_form is LogitsForm.TOKENS and proposal.tree.num_nodes > 1:
            assert proposal.is_chain, "acceptance is simulated for chains"
            device, shape = reduced.device, reduced[:, 1:].shape
            chance = generators.setdefault(device, torch.Generator(device).manual_seed(seed))
            right = torch.rand(shape, generator=chance, device=device) < rate
            agreed = torch.where(right, proposal.tokens[:, 1:], reduced[:, :-1])
            reduced = torch.cat([agreed, reduced[:, -1:]], 1)
        return verify(logits_form, samplers, proposal, reduced, masks)

    with patch.object(stepper, "verify", simulated):
        yield
