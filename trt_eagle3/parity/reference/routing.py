"""Routing: the experts of the reference's rows, where the engine chose other experts.

If the router logits of two experts nearly tie, rounding chooses one, and their outputs have nothing
in common. So the reference uses the engine's experts in rows where its own logits leave the choice
open, and only there. The weight of an expert is the reference's own.

Shapes: S rows, E experts, k experts of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trt_eagle3.parity.metrics import sizes

__all__ = ["RouterChoice", "Routes", "routed"]


@dataclass(frozen=True)
class Routes:
    """Experts that the engine chose.

    Attributes:
        experts: int64 [S, k].
        slack: largest distance of two logits that may swap, over the root mean square of the row.
    """

    experts: Tensor
    slack: float


@dataclass(frozen=True)
class RouterChoice:
    """A router's choice in the reference.

    Attributes:
        taken: int64 [S, k], the experts that the rows used.
        leads: float64 [S], how far the last expert of its own choice is above the next, divided by
            the root mean square of the row's logits; infinite if every expert is chosen.
        behind: float64 [S], how far the engine's experts are below its own choice, divided by the
            same; 0 if they are equal.
    """

    taken: Tensor
    leads: Tensor
    behind: Tensor


@contextmanager
def routed(mlp: Any, routes: Routes | None) -> Iterator[list[RouterChoice]]:
    """Make transformers' ``mlp`` use the experts of ``routes`` in rows where the choice is open.

    Yields a list that is filled as the module runs.
    """
    choices: list[RouterChoice] = []

    def reroute(router: Any, _: Any, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, weights, experts = found
        leads = _leads(logits, experts.shape[1])
        if routes is None:
            behind = torch.zeros(len(logits), dtype=torch.float64)
            choices.append(RouterChoice(experts.cpu(), leads, behind))
            return found
        theirs = routes.experts.to(experts.device)
        other, behind = _compared(logits, experts, theirs)
        rows = (other & (behind <= routes.slack))[:, None]
        taken = torch.where(rows, theirs, experts)
        choices.append(RouterChoice(taken.cpu(), leads, behind.cpu()))
        if not rows.any():
            return found
        probs = logits.float().softmax(dim=-1).gather(1, theirs)
        if getattr(router, "norm_topk_prob", True):
            probs = probs / probs.sum(dim=-1, keepdim=True)
        return logits, torch.where(rows, probs.to(weights), weights), taken

    hook = mlp.gate.register_forward_hook(reroute)
    try:
        yield choices
    finally:
        hook.remove()


def _leads(logits: Tensor, top_k: int) -> Tensor:
    if top_k == logits.shape[1]:
        return torch.full((len(logits),), torch.inf, dtype=torch.float64)
    best = logits.double().topk(top_k + 1, dim=-1).values
    return ((best[:, -2] - best[:, -1]) / sizes(logits)).cpu()


def _compared(logits: Tensor, experts: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Compare two choices of experts.

    Returns bool [S], rows in which ``theirs`` differ from ``experts``, and float64 [S], the largest
    logit distance between an expert of ``experts`` and its replacement.
    """
    ours, other = (_members(chosen, logits) for chosen in (experts, theirs))
    lost = logits.masked_fill(~(ours & ~other), -torch.inf).amax(dim=-1)
    came = logits.masked_fill(~(other & ~ours), torch.inf).amin(dim=-1)
    differ = (ours != other).any(dim=-1)
    behind = (lost - came).double() / sizes(logits)
    return differ, torch.where(differ, behind, 0.0)


def _members(experts: Tensor, logits: Tensor) -> Tensor:
    """bool [S, E]: the chosen experts."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, experts, value=True)
