"""Faults of options: grammars whose state or masks are those of another node, log-probabilities of
another distribution, limits that are not kept in a tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from tests.decode.mask_faults import bonus_unmasked, not_rolled_back, parents_masks
from tests.parity.fault import Fault
from tests.parity.planting import Planted
from trt_eagle3.decode.request import conversation
from trt_eagle3.decode.sampling import logits_process
from trt_eagle3.decode.sampling.grammar_state import GrammarState
from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.decode.step import stepper
from trt_eagle3.multimodal.tool_formats.json_object import JsonObjectEnd
from trt_eagle3.parity.record.options import HOT_SEEDS


def _late(p: Planted) -> None:
    true = GrammarState.advance
    kept: dict[int, list[int]] = {}

    def advance(self: GrammarState, tokens: Any) -> None:
        every = [*kept.get(id(self), []), *tokens]
        kept[id(self)] = every[-1:]
        true(self, every[:-1])

    p.patch.setattr(GrammarState, "advance", advance)


def _next_nodes_logprobs(p: Planted) -> None:
    true = stepper.LogprobsReadback
    p.patch.setattr(
        stepper,
        "LogprobsReadback",
        lambda num_best, logits, *rest: true(num_best, logits.roll(1, dims=1), *rest),
    )


def _bias_twice(p: Planted) -> None:
    true = Sampler.bias_on
    p.patch.setattr(Sampler, "bias_on", lambda self, device: 2 * true(self, device))


def _free_in_trees(p: Planted) -> None:
    """Nodes below the root may end an answer."""
    true = logits_process._changed

    def changed(sampler: Any, logits: Any, tokens: Any, mask: Any) -> Any:
        found = true(sampler, logits, tokens, mask)
        if len(tokens) > 1:
            ends = list(sampler.end_ids)
            found[1:, ends] = logits[1:, ends] + sampler.bias_on(logits.device)[ends]
        return found

    p.patch.setattr(logits_process, "_changed", changed)


def ignore_seeds(patch: pytest.MonkeyPatch, seeds: Iterator[int]) -> None:
    """Every sequence takes the next of ``seeds`` instead of its own."""
    true = Sampler.__init__

    def begin(self: Sampler, sampling: SamplingParams, *args: Any, **options: Any) -> None:
        true(self, replace(sampling, seed=next(seeds)), *args, **options)

    patch.setattr(Sampler, "__init__", begin)


def _no_schema(p: Planted) -> None:
    true = conversation._tag
    p.patch.setattr(conversation, "_tag", lambda tool, form, **_: true(tool, form, strict=False))


def _cut_short(p: Planted) -> None:
    true = JsonObjectEnd.feed

    def feed(self: JsonObjectEnd, text: str) -> int | None:
        end = true(self, text)
        return None if end is None else end - 1

    p.patch.setattr(JsonObjectEnd, "feed", feed)


_OPTIONS = ("options",)
OPTIONS: Mapping[str, Fault] = {
    "parent's mask": Fault(
        "what a grammar allows after a node's parent is allowed after the node",
        "options.grammar",
        "grammar",
        lambda p: parents_masks(p.patch),
        looks=_OPTIONS,
    ),
    "bonus unmasked": Fault(
        "the bonus token of a leaf may be any, whatever the grammar says",
        "options.grammar",
        "JSON Schema",
        lambda p: bonus_unmasked(p.patch),
        looks=_OPTIONS,
    ),
    "not rolled back": Fault(
        "a grammar's state stays at the first drafted token when it was only looked at",
        "options.grammar",
        "grammar",
        lambda p: not_rolled_back(p.patch),
        looks=_OPTIONS,
    ),
    "mask late": Fault(
        "a grammar hears of every token one token late",
        "options.grammar",
        "grammar",
        _late,
        looks=_OPTIONS,
    ),
    "tool without schema": Fault(
        "the arguments of a tool that must be called may be any object",
        "options.tools_format",
        "tools",
        _no_schema,
        looks=_OPTIONS,
    ),
    "call cut short": Fault(
        "what is made of an answer ends a call's arguments a character early",
        "options.tools_format",
        "tools",
        _cut_short,
        looks=_OPTIONS,
    ),
    "min_tokens in trees": Fault(
        "nodes below the root may end an answer before min_tokens",
        "options.tokens",
        "min_tokens",
        _free_in_trees,
        looks=_OPTIONS,
    ),
    "seed ignored": Fault(
        "a request's seed is ignored",
        "options.tokens",
        HOT_SEEDS[0],
        lambda p: ignore_seeds(p.patch, count()),
        also=("options.seeds",),
        looks=_OPTIONS,
    ),
    "logprobs of another node": Fault(
        "log-probabilities are those of another node's distribution",
        "options.logprobs",
        "logprobs",
        _next_nodes_logprobs,
        looks=_OPTIONS,
    ),
    "bias twice": Fault(
        "logit_bias is added twice",
        "sampling.probabilities",
        "bias",
        _bias_twice,
        looks=("sampling",),
    ),
}
