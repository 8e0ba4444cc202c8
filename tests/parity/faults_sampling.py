"""Faults of sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.parity.fault import MORE_TOKENS, Fault
from tests.parity.planting import Planted
from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.sampling import logits_process
from trt_eagle3.decode.sampling import sampler as sampling
from trt_eagle3.decode.sampling.sampling_params import GREEDY, SamplingParams
from trt_eagle3.decode.speculation import verify
from trt_eagle3.decode.speculation.accept import AcceptedPaths
from trt_eagle3.decode.speculation.proposal import Proposal


def _greedily(request: Request) -> Request:
    given = request.sampling
    plain = dataclasses.replace(
        GREEDY, max_tokens=given.max_tokens, ignore_eos=given.ignore_eos, stop=given.stop
    )
    return dataclasses.replace(request, sampling=plain)


def _double_top_p(p: Planted) -> None:
    true = sampling.target_probs

    def twice(logits: Tensor, options: SamplingParams) -> Tensor:
        probs = true(logits, options)
        again = dataclasses.replace(options, temperature=1.0, top_k=0, min_p=0.0)
        return true(probs.clamp(min=1e-30).log().float(), again) if options.top_p < 1 else probs

    p.patch.setattr(sampling, "target_probs", twice)


def _biased(p: Planted) -> None:
    true = verify.accept_sampled

    def lenient(proposal: Proposal, probs: Tensor, *args: Tensor) -> AcceptedPaths:
        return true(proposal, torch.where(probs < 0.5, probs.sqrt(), probs), *args)

    p.patch.setattr(verify, "accept_sampled", lenient)


def _change_bonus(p: Planted, change: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    """Sampled trees get other bonus tokens:

    ``change(result, logits [B, T, V], mask [B, T, T])``, wherever it is verified.
    """
    true = sampling.verify_results

    def changed_results(
        samplers: Any, logits: Tensor, tokens: Tensor, parents: Tensor, mask: Tensor, *allowed: Any
    ) -> Any:
        found = true(samplers, logits, tokens, parents, mask, *allowed)
        if samplers[0].sampling.greedy:
            return found
        return dataclasses.replace(found, bonus=change(found, logits, mask))

    for module in (sampling, verify):
        p.patch.setattr(module, "verify_results", changed_results)


def _kept_mass(p: Planted) -> None:
    """The bonus token is drawn as if nothing had been rejected."""
    generator = torch.Generator().manual_seed(0)
    options = SamplingParams(temperature=0.7)

    def draw(_: Any, logits: Tensor, mask: Tensor) -> Tensor:
        probs = sampling.target_probs(logits.flatten(0, 1), options)
        return torch.multinomial(probs, 1, generator=generator).view(mask.shape[:2])

    _change_bonus(p, draw)


def _without_min_p(p: Planted) -> None:
    true = sampling.target_probs
    p.patch.setattr(
        sampling,
        "target_probs",
        lambda x, options: true(x, dataclasses.replace(options, min_p=0.0)),
    )


def _penalties_of_the_root(p: Planted) -> None:
    """A node's path does not count among the tokens that are penalised."""
    true = logits_process.History.penalise
    p.patch.setattr(
        logits_process.History,
        "penalise",
        lambda self, x, t, _: true(self, x, t, torch.eye(len(t), dtype=torch.bool)),
    )


def _colder_first(p: Planted) -> None:
    true = sampling.Sampler.first
    p.patch.setattr(
        sampling.Sampler,
        "first",
        lambda self, x: true(self, x if self.sampling.greedy else x / 0.5),
    )


def _greedy_below(p: Planted) -> None:
    """Bonus tokens below the first level of a tree are the likeliest."""
    _change_bonus(
        p,
        lambda found, logits, mask: torch.where(
            mask.sum(dim=-1) > 2, logits.argmax(dim=-1), found.bonus
        ),
    )


SAMPLING: Mapping[str, Fault] = {
    "top_p twice": Fault(
        "top-p is applied to what top-p has left",
        "sampling.probabilities",
        "top_p 0.8",
        _double_top_p,
        looks=("sampling",),
    ),
    "min_p ignored": Fault(
        "min-p is not applied",
        "sampling.probabilities",
        "min_p 0.1",
        _without_min_p,
        looks=("sampling",),
    ),
    "biased acceptance": Fault(
        "drafted tokens are accepted more often than their probability",
        "sampling.tokens",
        "temperature 0.7: first token",
        _biased,
        looks=("sampling",),
    ),
    "sampling ignored": Fault(
        "requests that ask for sampling are answered greedily",
        "sampling.tokens",
        "the engine's own answers",
        lambda p: setattr(p, "request", _greedily),
        looks=("sampling",),
        max_tokens=MORE_TOKENS,
    ),
    "rejected mass kept": Fault(
        "the bonus token is drawn as if no sibling had been rejected",
        "sampling.tokens",
        "temperature 0.7: first token",
        _kept_mass,
        looks=("sampling",),
    ),
    "penalties of the root": Fault(
        "penalties do not count the tokens on a node's own path",
        "sampling.probabilities",
        "penalties",
        _penalties_of_the_root,
        looks=("sampling",),
    ),
    "colder first": Fault(
        "the first token of an answer is drawn at half the temperature",
        "sampling.tokens",
        "temperature 0.7: token without a tree",
        _colder_first,
        looks=("sampling",),
    ),
    "greedy below": Fault(
        "deep in a tree the bonus token is always the likeliest",
        "sampling.tokens",
        "temperature 0.7: third token",
        _greedy_below,
        looks=("sampling",),
    ),
}
