"""Grammars over the tiny pair's vocabulary, and a target whose logits are drawn from the tokens
before them: answers of any grammar, with trees and without, in microseconds.

Shapes: T tree nodes, V vocab.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any
from zlib import crc32

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tests.decode.stub import Stub, verify_step
from tests.tiny import TARGET
from trt_eagle3.decode.sampling.grammar import Grammar
from trt_eagle3.decode.sampling.grammar_compiler import GrammarCompiler
from trt_eagle3.decode.sampling.grammar_masks import fill_next
from trt_eagle3.decode.sampling.grammar_state import GrammarState
from trt_eagle3.decode.sampling.grammar_text import grammar_text
from trt_eagle3.decode.sampling.logits_process import unpacked_bits
from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.decode.speculation.accept import Accepted
from trt_eagle3.decode.speculation.proposal import tree_proposal
from trt_eagle3.decode.speculation.tree import Tree

VOCAB = 640
ENDS = (632, 634)  # <|endoftext|>, <|im_end|>
_CLOSING = '"}],:0'
TREES = {
    "plain": Tree.root_only(),
    "chain": Tree.from_paths([(0,), (0, 0), (0, 0, 0)]),
    "tree": Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), VOCAB, ENDS)


def state_of(grammar: Grammar, **options: Any) -> GrammarState:
    """At its beginning, without a try in a process; refused as there."""
    made = compiler()._compiled(grammar_text(grammar))
    assert not isinstance(made, str), made
    return GrammarState(made.matcher, ENDS, VOCAB, **options)


def ids_of(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def text_of(tokens: Sequence[int]) -> str:
    return str(tokenizer().decode([t for t in tokens if t not in ENDS]))


@cache
def _closing() -> Tensor:
    """f32 [V]: what makes answers end some day."""
    bias = torch.zeros(VOCAB)
    for c in _CLOSING:
        bias[ids_of(c)[0]] = 2.0
    bias[list(ENDS)] = 4.0
    return bias


def logits_after(tokens: Sequence[int], seed: int = 0) -> Tensor:
    """f32 [V], drawn from ``tokens``: the target."""
    return _drawn(tuple(tokens), seed)


@lru_cache(maxsize=4096)
def _drawn(tokens: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(crc32(repr((seed, *tokens)).encode()))
    return 2 * torch.randn(VOCAB, generator=generator) + _closing()


class StubAnswer(Stub):
    """A stub that ends as an answer does."""

    @property
    def over(self) -> bool:
        ended = any(t in ENDS for t in self.tokens) or bool(self.sampler.error)
        return ended or len(self.tokens) >= self.sampler.sampling.max_tokens

    @property
    def answer(self) -> list[int]:
        """Cut at its end."""
        ends = [i + 1 for i, t in enumerate(self.tokens) if t in ENDS]
        return self.tokens[: min([*ends, self.sampler.sampling.max_tokens])]


def stub_of(sampling: SamplingParams) -> StubAnswer:
    state = None
    if sampling.grammar is not None:
        state = state_of(
            sampling.grammar, min_tokens=sampling.min_tokens, ignore_eos=sampling.ignore_eos
        )
    ends = () if sampling.ignore_eos else ENDS
    return StubAnswer(Sampler(sampling, torch.tensor([5, 6]), VOCAB, state, ends))


def drafted(stub: Stub, tree: Tree, chance: random.Random, seed: int) -> list[int]:
    """Tokens of a tree: the target's best ones, some of which no grammar looks at, or any."""
    tokens, paths = [stub.tokens[-1]], [list(stub.tokens)]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        logits = logits_after(paths[parent], seed)
        state = stub.sampler.grammar
        for token in paths[parent][len(stub.tokens) :]:
            state = state.after(token) if state is not None else None
        if state is not None and chance.random() < 0.8:  # as a draft that has learned it
            bits = torch.empty(VOCAB // 32, dtype=torch.int32)
            fill_next(state, bits.numpy())
            logits = logits.masked_fill(~unpacked_bits(bits, VOCAB), -100.0)
        order = logits.topk(rank + 1).indices.tolist()
        siblings = {tokens[i] for i, p in enumerate(tree.parents[: len(tokens)]) if p == parent}
        token = next((t for t in reversed(order) if t not in siblings), chance.randrange(VOCAB))
        tokens.append(token)
        paths.append([*paths[parent], token])
    return tokens


def step(
    stubs: Sequence[Stub], tree: Tree, chance: random.Random, seed: int, *, ragged: bool
) -> None:
    """One step of ``stubs`` and a row of padding. ``ragged``: the last nodes of some trees are not
    verified, their logits NaN.
    """
    drafts = [drafted(s, tree, chance, seed) for s in stubs]
    logits = torch.full((len(stubs) + 1, tree.num_nodes, VOCAB), torch.nan)
    num_kept = [1 + chance.randrange(tree.num_nodes) if ragged else tree.num_nodes for _ in stubs]
    for row, (s, tokens, kept) in enumerate(zip(stubs, drafts, num_kept, strict=True)):
        paths = [list(s.tokens)]
        for token, parent in zip(tokens[1:], tree.parents[1:], strict=True):
            paths.append([*paths[parent], token])
        logits[row, :kept] = torch.stack([logits_after(path, seed) for path in paths[:kept]])
    proposal = tree_proposal(tree, torch.tensor([*drafts, drafts[0]]))
    if ragged:
        proposal = replace(proposal, num_kept=torch.tensor([*num_kept, 1], dtype=torch.int32))
    verify_step(stubs, proposal, logits)


def generate(
    samplings: Sequence[SamplingParams], tree: Tree, seed: int = 0, *, ragged: bool = False
) -> list[StubAnswer]:
    """Answers of a batch, whose drafts are right now and then."""
    chance = random.Random(seed)
    stubs = [stub_of(sampling) for sampling in samplings]
    for s in stubs:
        s.append(Accepted((int(s.sampler.first(logits_after((), seed))),)))
    while going := [s for s in stubs if not s.over]:
        step(going, tree, chance, seed, ragged=ragged)
    return stubs
