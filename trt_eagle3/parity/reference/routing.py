"""Routing: which experts the reference's rows go through, where the engine chose others.

Of two experts whose router logits all but tie rounding chooses one, and what they compute has
nothing in common. So the reference goes through the engine's experts in rows where its own logits
leave the choice open, and only there. How much an expert counts is the reference's own.

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

__all__ = ["ROUTER", "RouterChoice", "Routes", "chosen_experts", "routed"]

ROUTER = "mlp.router_logits"
"""Of a layer, in the target graph."""


@dataclass(frozen=True)
class Routes:
    """Experts that the engine chose.

    Attributes:
        experts: int64 [S, k]. slack: how near two logits are that may change places, over the root
            mean square of the row's.
    """

    experts: Tensor
    slack: float


@dataclass(frozen=True)
class RouterChoice:
    """What a router of the reference chose, and what it nearly chose.

    Attributes:
        taken: int64 [S, k], the experts that its rows went through. own: those of its own logits.
            other: the same, with the next best expert in the place of the last.
        leads: float64 [S], how far the last expert of ``own`` is above the next, over the root mean
            square of the row's logits; infinite where every expert is chosen.
    """

    taken: Tensor
    own: Tensor
    other: Tensor
    leads: Tensor

    def alternatives(self, row: int, slack: float) -> list[Tensor]:
        """int64 [k] each: what ``row`` might as well have gone through; none where it is not open,
        by a ``slack`` as of ``Routes``.
        """
        if float(self.leads[row]) > slack:
            return []
        taken = set(self.taken[row].tolist())
        return [x[row] for x in (self.own, self.other) if set(x[row].tolist()) != taken]


def chosen_experts(router_logits: Tensor, top_k: int) -> list[Tensor]:
    """int64 [S, k]: what an engine chooses by its own logits [S, E]; of equal ones the first, and
    where that differs also those that torch takes.
    """
    probs = router_logits.float().softmax(dim=-1)
    ordered = probs.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    other = probs.topk(top_k, dim=-1).indices
    same = torch.equal(_members(ordered, probs), _members(other, probs))
    return [ordered] if same else [ordered, other]


@contextmanager
def routed(mlp: Any, routes: Routes | None) -> Iterator[list[RouterChoice]]:
    """Meanwhile transformers' ``mlp`` takes the experts of ``routes``, where they are open.

    Yields what fills as it runs.
    """
    choices: list[RouterChoice] = []

    def reroute(router: Any, _: Any, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, weights, experts = found
        rows = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        theirs = experts
        if routes is not None:
            theirs = routes.experts.to(experts.device)
            rows = _open_rows(logits, experts, theirs, routes.slack)
        taken = torch.where(rows[:, None], theirs, experts)
        choices.append(_choice(logits, experts, taken))
        if not rows.any():
            return found
        probs = logits.float().softmax(dim=-1).gather(1, theirs)
        if getattr(router, "norm_topk_prob", True):
            probs = probs / probs.sum(dim=-1, keepdim=True)
        weights = torch.where(rows[:, None], probs.to(weights), weights)
        return logits, weights, taken

    hook = mlp.gate.register_forward_hook(reroute)
    try:
        yield choices
    finally:
        hook.remove()


def _choice(logits: Tensor, own: Tensor, taken: Tensor) -> RouterChoice:
    top_k = own.shape[1]
    if top_k == logits.shape[1]:
        leads = torch.full((len(logits),), torch.inf, dtype=torch.float64)
        return RouterChoice(taken.cpu(), own.cpu(), own.cpu(), leads)
    ordered = logits.double().topk(top_k + 1, dim=-1)
    leads = (ordered.values[:, -2] - ordered.values[:, -1]) / sizes(logits)
    others = torch.cat([ordered.indices[:, : top_k - 1], ordered.indices[:, -1:]], dim=1)
    return RouterChoice(taken.cpu(), own.cpu(), others.cpu(), leads.cpu())


def _open_rows(logits: Tensor, experts: Tensor, theirs: Tensor, slack: float) -> Tensor:
    """bool [S]: where ``theirs`` are others, and no logit lost of ``experts`` is far above one that
    came for it.
    """
    ours, other = (_members(chosen, logits) for chosen in (experts, theirs))
    lost = logits.masked_fill(~(ours & ~other), -torch.inf).amax(dim=-1)
    came = logits.masked_fill(~(other & ~ours), torch.inf).amin(dim=-1)
    return (ours != other).any(dim=-1) & ((lost - came).double() <= slack * sizes(logits))


def _members(experts: Tensor, logits: Tensor) -> Tensor:
    """bool [S, E]."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, experts, value=True)
