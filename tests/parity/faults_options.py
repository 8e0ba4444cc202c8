"""Faults of options: grammars whose state or masks are those of another node, log-probabilities of
another distribution, limits that are not kept in a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.parity.fault import Fault
from tests.parity.planting import Planted
from trt_eagle3.decode import conversation, logits_process, tree_masks, verify
from trt_eagle3.decode.grammar_state import GrammarState
from trt_eagle3.decode.sampling import Sampler
from trt_eagle3.multimodal.json_object import JsonObjectEnd


def _filled(p: Planted, change: Callable[[Any, Any, Any, Any], object]) -> None:
    """``change(state, tokens, parents, rows)`` after the masks of every tree."""
    true = tree_masks.fill_trees

    def fill(jobs: Any, masks: Any) -> None:
        true(jobs, masks)
        for job, rows in zip(jobs, masks, strict=True):
            change(*job, rows)

    p.patch.setattr(tree_masks, "fill_trees", fill)


def _of_parents(p: Planted) -> None:
    def change(_: Any, __: Any, parents: Any, rows: Any) -> None:
        rows[:] = rows[[max(parent, 0) for parent in parents]].copy()

    _filled(p, change)


def _bonus_unmasked(p: Planted) -> None:
    def change(_: Any, tokens: Any, parents: Any, rows: Any) -> None:
        if len(tokens) > 1:
            rows[[node for node in range(len(tokens)) if node not in parents]] = -1

    _filled(p, change)


def _not_rolled_back(p: Planted) -> None:
    _filled(p, lambda s, tokens, *_: s.matcher.try_consume_tokens(tokens[1:2]))


def _late(p: Planted) -> None:
    true = GrammarState.advance
    kept: dict[int, list[int]] = {}

    def advance(self: GrammarState, tokens: Any) -> None:
        every = [*kept.get(id(self), []), *tokens]
        kept[id(self)] = every[-1:]
        true(self, every[:-1])

    p.patch.setattr(GrammarState, "advance", advance)


def _next_nodes_logprobs(p: Planted) -> None:
    true = verify.path_logprobs
    p.patch.setattr(verify, "path_logprobs", lambda s, found, x: true(s, found, x.roll(1, dims=1)))


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


def _no_schema(p: Planted) -> None:
    true = conversation._tag
    p.patch.setattr(conversation, "_tag", lambda tool, **_: true(tool, strict=False))


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
        _of_parents,
        looks=_OPTIONS,
    ),
    "bonus unmasked": Fault(
        "the bonus token of a leaf may be any, whatever the grammar says",
        "options.grammar",
        "JSON Schema",
        _bonus_unmasked,
        looks=_OPTIONS,
    ),
    "not rolled back": Fault(
        "a grammar's state stays at the first drafted token when it was only looked at",
        "options.grammar",
        "grammar",
        _not_rolled_back,
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
