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

from trt_eagle3.decode.forward.device_batch import DeviceBatch
from trt_eagle3.decode.speculation import verify
from trt_eagle3.decode.speculation.accept import Accepted, accept
from trt_eagle3.decode.speculation.outcome import is_chain
from trt_eagle3.decode.speculation.propose import Proposal
from trt_eagle3.decode.speculation.tree import AnyTree
from trt_eagle3.decode.speculation.tree_outcome import gives_tokens
from trt_eagle3.decode.step.async_cycle import AsyncCycles
from trt_eagle3.engine.session import Reduction

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

    verify_step = AsyncCycles._verify

    def on_device(
        cycles: AsyncCycles,
        tree: AnyTree,
        proposal: Proposal,
        batch: DeviceBatch,
        reduce: Reduction | None,
    ) -> tuple[Tensor, Tensor | None]:
        said, aux = verify_step(cycles, tree, proposal, batch, reduce)
        if not gives_tokens(reduce) or tree.num_nodes == 1:
            return said, aux
        assert is_chain(tree), "acceptance is simulated for chains"
        right = torch.rand(said[:, 1:].shape, device=said.device) < rate
        agreed = torch.where(right, proposal.tokens[:, 1:], said[:, :-1])
        return torch.cat([agreed, said[:, -1:]], 1), aux

    with (
        patch(f"{verify.__name__}.accept", on_host),
        patch.object(AsyncCycles, "_verify", on_device),
    ):
        yield
