"""Masks of a tree against those of a new matcher for every node."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.decode.random_tree import random_tree
from tests.decode.structured import ENDS, TREES, VOCAB, ids_of, state_of
from trt_eagle3.decode.sampling.grammar import Grammar
from trt_eagle3.decode.sampling.grammar_masks import NO_MASK, fill_next, fill_roots, fill_trees
from trt_eagle3.decode.sampling.grammar_state import ALL_ALLOWED, GrammarState
from trt_eagle3.decode.sampling.logits_process import unpacked_bits
from trt_eagle3.decode.speculation.tree import Tree

SCHEMA = {"type": "array", "items": {"enum": ["x", 12, None]}, "maxItems": 3}
GRAMMAR = Grammar.json_schema(SCHEMA)


def rows(count: int) -> Tensor:
    return torch.full((count, VOCAB // 32), 7, dtype=torch.int32)


def masks_of(state: GrammarState, tokens: list[int], tree: Tree) -> Tensor:
    """int32 [T, W] by ``fill_trees``."""
    found = rows(tree.num_nodes)
    [index] = fill_trees([(state, tokens, tree.parents)], found.numpy())
    whole = found[index]
    whole[torch.tensor(index) == NO_MASK] = ALL_ALLOWED
    return whole


def allowed(state: GrammarState) -> Tensor:
    """bool [V]: what may come next."""
    row = rows(1)
    fill_next(state, row.numpy()[0])
    return unpacked_bits(row, VOCAB)[0]


def allowed_after(tokens: list[int], grammar: Grammar = GRAMMAR, **options: object) -> Tensor:
    """``allowed`` after the whole answer ``tokens``, of a state of its own."""
    state = state_of(grammar, **options)
    state.advance(tokens)
    return allowed(state)


def drawn_tree(tree: Tree, answer: list[int], chance: random.Random) -> list[int]:
    """Tokens that the grammar allows, or not, or that end it."""
    tokens, paths = [answer[-1]], [answer]
    for parent in tree.parents[1:]:
        good = allowed_after(paths[parent]).nonzero().flatten().tolist()
        token = chance.choice([chance.choice(good), chance.choice(good), chance.randrange(VOCAB)])
        tokens.append(token)
        paths.append([*paths[parent], token])
    return tokens


@pytest.mark.parametrize("seed", range(12))
def test_masks_of_a_tree_are_those_of_each_path_alone(seed: int) -> None:
    tree, chance = TREES["tree"], random.Random(seed)
    answer = ids_of('["x", 12')[: 1 + seed % 5]
    tokens = drawn_tree(tree, answer, chance)
    state = state_of(GRAMMAR)
    state.advance(answer)
    found = masks_of(state, tokens, tree)
    paths = [answer]
    for node, (token, parent) in enumerate(zip(tokens, tree.parents, strict=True)):
        if node:
            paths.append([*paths[parent], token])
        path, ours = paths[node], unpacked_bits(found[node], VOCAB)
        possible = all(
            bool(allowed_after(path[:n])[path[n]]) and path[n] not in ENDS
            for n in range(len(answer), len(path))
        )
        expected = allowed_after(path) if possible else torch.ones(VOCAB, dtype=torch.bool)
        assert torch.equal(ours, expected), (node, path)
    fill_roots([state], rows(1).numpy())
    again = masks_of(state, tokens, tree)
    assert torch.equal(found, again), "the walk left the state where it was"


@pytest.mark.parametrize("seed", range(6))
def test_masks_of_a_batch_of_trees_are_those_of_each_alone(seed: int) -> None:
    """Some answers have ended."""
    chance, trees = random.Random(seed), list[tuple[GrammarState, list[int], Tree]]()
    for _ in range(5):
        answer = ids_of('["x", 12')[: chance.randint(1, 5)]
        tree, state = random_tree(chance), state_of(GRAMMAR, min_tokens=chance.choice([0, 5]))
        tokens = drawn_tree(tree, answer, chance)
        state.advance([*answer, *ENDS[: chance.random() < 0.3]])
        trees.append((state, tokens, tree))
    alone = [masks_of(*tree) for tree in trees]
    batch = rows(sum(tree.num_nodes for *_, tree in trees))
    found = fill_trees([(s, t, tree.parents) for s, t, tree in trees], batch.numpy())
    for index, expected in zip(found, alone, strict=True):
        whole = batch[index]
        whole[torch.tensor(index) == NO_MASK] = ALL_ALLOWED
        assert torch.equal(whole, expected)
    assert len({NO_MASK, *(row for index in found for row in index)}) > len(trees)


def only_ends(allowed: Tensor) -> bool:
    return allowed.nonzero().flatten().tolist() == list(ENDS)


def test_end_tokens_are_forbidden_until_min_tokens_unless_nothing_else_is_allowed() -> None:
    assert not allowed_after(ids_of("[12"))[ENDS[0]]
    whole = ids_of('["x"]')
    assert only_ends(allowed_after(whole))
    assert only_ends(allowed_after(whole, min_tokens=50))
    digits, open_end = ids_of("1234"), Grammar.regex("[0-9]+")
    ends = [bool(allowed_after(digits[:n], open_end, min_tokens=3)[ENDS[1]]) for n in range(1, 5)]
    assert ends == [False, False, True, True]


def test_ignored_end_tokens_are_forbidden_while_anything_else_is_allowed() -> None:
    two = Grammar.regex("[0-9]{1,2}")
    assert not allowed_after(ids_of("1"), two, ignore_eos=True)[list(ENDS)].any()
    assert only_ends(allowed_after(ids_of("12"), two, ignore_eos=True))


def test_state_after_a_forbidden_token_has_an_error_and_forbids_nothing() -> None:
    state = state_of(GRAMMAR)
    state.advance(ids_of("x"))
    assert state.error
    assert allowed(state).all()


def test_finished_state_ignores_more_tokens() -> None:
    state = state_of(GRAMMAR)
    state.advance([*ids_of("[]"), ENDS[1], 5, 6])
    assert state.finished
    assert not state.error
    assert state.after(5) is None
