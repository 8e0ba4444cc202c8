"""Acceptance: a reference walk against its definition, and the device against that walk."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.decode import reference_accept
from tests.decode.random_tree import random_tree
from tests.decode.reference_accept import Walk, accept
from trt_eagle3.decode.speculation import accept as accept_module
from trt_eagle3.decode.speculation.accept import (
    NO_TOKEN,
    AcceptedPaths,
    accept_greedy,
    accept_sampled,
    greedy_tokens,
)
from trt_eagle3.decode.speculation.dynamic_tree import DynamicTree, ancestors
from trt_eagle3.decode.speculation.proposal import Proposal, tree_proposal
from trt_eagle3.decode.speculation.tree import AnyTree, Tree

Drafted = tuple[list[int], list[int], list[int]]


def never() -> float:
    raise AssertionError("greedy acceptance drew a random number")


def certain(target: Sequence[int], draft: Sequence[int], parents: Sequence[int]) -> Walk:
    """``accept`` where the target is certain of its tokens."""
    probs = [float(target[parent] == token) for token, parent in zip(draft, parents, strict=True)]
    return accept(draft, parents, probs, target, never)


def longest_path(target: list[int], draft: list[int], parents: list[int]) -> Walk:
    """Of all root paths on which every token is the target's after its parent, the longest; then
    the bonus token.
    """
    best = (0,)
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        agrees = all(draft[child] == target[parent] for parent, child in itertools.pairwise(path))
        if agrees and len(path) > len(best):
            best = tuple(path)
    return Walk(best, (*(draft[node] for node in best[1:]), target[best[-1]]))


def proposal_of(tokens: list[list[int]], parents: list[list[int]]) -> Proposal:
    """Trees of any shapes, as a dynamic tree's."""
    above = torch.tensor(parents)
    mask = ancestors(above, above.shape[1])
    depths = mask.sum(dim=2) - 1
    tree = DynamicTree(int(depths.max()), 9, above.shape[1])
    return Proposal(tree, torch.tensor(tokens), above, depths, mask)


def check(paths: AcceptedPaths, tree: AnyTree, expected: list[Walk]) -> list[int]:
    """Each row accepts what is ``expected``; returns how many random numbers each used."""
    found = AcceptedPaths.unpacked(paths.packed().tolist(), tree.depth)
    every = zip(paths.path.tolist(), paths.counts.tolist(), found, strict=True)
    assert [Walk(tuple(path[:count]), a.tokens) for path, count, a in every] == expected
    assert paths.last.tolist() == [walk.tokens[-1] for walk in expected]
    assert paths.finite.all()
    return [accepted.draws for accepted in found]


def check_certain(target: list[int], draft: list[int], parents: list[int], walk: Walk) -> None:
    assert certain(target, draft, parents) == walk
    proposal = proposal_of([draft], [parents])
    check(accept_greedy(proposal, torch.tensor([target])), proposal.tree, [walk])


@st.composite
def drafted(draw: st.DrawFn, max_nodes: int = 14, max_vocab: int = 4) -> Drafted:
    """Target tokens, draft tokens and parents of a tree whose siblings differ, over very few
    tokens.
    """
    vocab = draw(st.integers(1, max_vocab))
    token = st.integers(0, vocab - 1)
    parents, draft = [-1], [draw(token)]
    for _ in range(draw(st.integers(0, max_nodes))):
        parent, word = draw(st.integers(0, len(parents) - 1)), draw(token)
        if (parent, word) not in zip(parents[1:], draft[1:], strict=True):
            parents.append(parent)
            draft.append(word)
    return draw(st.lists(token, min_size=len(parents), max_size=len(parents))), draft, parents


@given(case=drafted())
def test_certain_target_accepts_the_longest_path_that_agrees(case: Drafted) -> None:
    check_certain(*case, longest_path(*case))


EXAMPLES: dict[str, tuple[list[int], list[int], list[int], Walk]] = {
    "all rejected": ([5, 1, 2], [9, 6, 7], [-1, 0, 0], Walk((0,), (5,))),
    "whole chain": ([1, 2, 3], [9, 1, 2], [-1, 0, 1], Walk((0, 1, 2), (1, 2, 3))),
    "later siblings": (
        [7, 0, 8, 0, 4], [9, 6, 7, 6, 8], [-1, 0, 0, 1, 2], Walk((0, 2, 4), (7, 8, 4))
    ),
    "right token, wrong parent": ([7, 7, 7], [9, 6, 7], [-1, 0, 1], Walk((0,), (7,))),
    "root alone": ([3], [9], [-1], Walk((0,), (3,))),
    "target repeats the root": ([9, 0], [9, 4], [-1, 0], Walk((0,), (9,))),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_accept_by_hand(name: str) -> None:
    check_certain(*EXAMPLES[name])


_SHARES = 4
"""A node's target probabilities are multiples of 1/4, so that few random numbers stand for all:
see ``outcomes``.
"""


@st.composite
def accept_probs(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]]]:
    """Tokens and parents of a tree of at most 6 nodes, and of each node the target's shares over
    3 tokens.
    """
    _, tokens, parents = draw(drafted(max_nodes=5, max_vocab=3))
    split = st.tuples(st.integers(0, _SHARES), st.integers(0, _SHARES)).map(sorted)
    cuts = draw(st.lists(split, min_size=len(tokens), max_size=len(tokens)))
    return tokens, parents, [[low, high - low, _SHARES - high] for low, high in cuts]


def outcomes(
    tokens: list[int], parents: list[int], probs: list[float]
) -> Iterator[tuple[Fraction, tuple[int, ...]]]:
    """Every path that ``accept`` can take, with its exact probability.

    ``accept`` is run with random numbers from a grid so fine that all numbers of a cell compare
    alike: what is left is 1 to 4 shares, so a threshold is a multiple of 1/12.
    """
    pending: list[list[float]] = [[]]
    while pending:
        numbers = pending.pop()
        try:
            found = accept(tokens, parents, probs, range(len(tokens)), iter(numbers).__next__)
        except StopIteration:
            pending += [[*numbers, (cell + 0.5) / 12] for cell in range(12)]
        else:
            yield Fraction(1, 12 ** len(numbers)), found.path


def emitted(
    tokens: list[int], parents: list[int], shares: list[list[int]]
) -> tuple[dict[tuple[int, ...], Fraction], dict[tuple[int, ...], Fraction]]:
    """Probability of each path of tokens with its bonus, from ``accept`` and of the target.

    The bonus is the target's distribution at the last node without that node's children.
    """
    probs = [shares[parent][token] / _SHARES for token, parent in zip(tokens, parents, strict=True)]
    found: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    expected: dict[tuple[int, ...], Fraction] = {}
    for weight, path in outcomes(tokens, parents, probs):
        children = {tokens[node] for node, parent in enumerate(parents) if parent == path[-1]}
        left = {t: share for t, share in enumerate(shares[path[-1]]) if t not in children and share}
        assert left, "the walk ends where no token is left to emit"
        for token, share in left.items():
            output_ids = (*(tokens[node] for node in path[1:]), token)
            found[output_ids] += weight * Fraction(share, sum(left.values()))
            truth = Fraction(1)
            for node, word in zip(path, output_ids, strict=True):
                truth *= Fraction(shares[node][word], _SHARES)
            expected[output_ids] = truth
    return found, expected


@given(case=accept_probs())
def test_emitted_tokens_have_exactly_the_targets_probability(
    case: tuple[list[int], list[int], list[list[int]]],
) -> None:
    found, expected = emitted(*case)
    assert found == expected
    assert sum(found.values()) == 1


UNEVEN = [0, 0, 1, 2, 0], [-1, 0, 0, 1, 1], [[1, 1, 2], [1, 1, 2], [2, 1, 1], [4, 0, 0], [0, 4, 0]]


def raw_sibling(siblings: Any, probs: Any, uniform: Callable[[], float]) -> int | None:
    """A sibling is tried by its own probability, as if none before it had been rejected."""
    for node in siblings:
        if uniform() < probs[node]:
            return int(node)
    return None


def likeliest_sibling(siblings: Any, probs: Any, uniform: Callable[[], float]) -> int | None:
    """The best sibling alone is tried."""
    best = max(siblings, key=lambda node: probs[node], default=None)
    return best if best is not None and uniform() < probs[best] else None


def one_number_for_all(siblings: Any, probs: Any, uniform: Callable[[], float]) -> int | None:
    """All siblings are tried with one random number."""
    number, left = uniform() if siblings else 0.0, 1.0
    for node in siblings:
        if number * left < probs[node]:
            return int(node)
        left -= probs[node]
    return None


@pytest.mark.parametrize("rule", [raw_sibling, likeliest_sibling, one_number_for_all])
def test_biased_rule_is_caught(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, expected = emitted(*UNEVEN)
    assert found == expected
    monkeypatch.setattr(reference_accept, "_chosen", rule)
    found, expected = emitted(*UNEVEN)
    assert found != expected


# The device against the reference

KINDS = ("chain", "static", "dynamic")


def drawn_proposal(kind: str, chance: random.Random, *, ragged: bool) -> Proposal:
    """Three trees whose siblings differ. ``ragged``: some nodes are dropped."""
    count = chance.randint(2, 10)
    if kind == "dynamic":
        parents = [[-1, *(chance.randrange(i) for i in range(1, count))] for _ in range(3)]
        proposal = proposal_of([[0] * count] * 3, parents)
    else:
        chain = Tree.from_paths([(0,) * depth for depth in range(1, count)])
        tree = chain if kind == "chain" else random_tree(chance)
        proposal = tree_proposal(tree, torch.zeros(3, tree.num_nodes, dtype=torch.int64))
    above = proposal.parents
    rank = (above[:, :, None] == above[:, None, :]).tril(-1).sum(dim=2)
    proposal = replace(proposal, tokens=3 * (rank + 1))
    if ragged:
        kept = [chance.randint(1, above.shape[1]) for _ in range(3)]
        proposal = replace(proposal, num_kept=torch.tensor(kept, dtype=torch.int32))
    return proposal


def at_dropped(proposal: Proposal, values: Tensor, garbage: int) -> Tensor:
    """``values`` [B, T] with ``garbage`` at dropped nodes."""
    dropped = proposal.dropped()
    return values if dropped is None else values.masked_fill(dropped, garbage)


def kept_rows(proposal: Proposal, *fields: Tensor) -> Iterator[list[list[Any]]]:
    """Of each sequence the lists of its nodes that are verified: tokens, parents and ``fields``."""
    size, count = proposal.tokens.shape
    kept = [count] * size if proposal.num_kept is None else proposal.num_kept.tolist()
    for row, n in enumerate(kept):
        yield [field[row, :n].tolist() for field in (proposal.tokens, proposal.parents, *fields)]


def greedy_accepted(kind: str, *, ragged: bool) -> int:
    """Check greedy acceptance of 300 batches; returns how many nodes were accepted."""
    chance, accepted = random.Random(0), 0
    for _ in range(300):
        proposal = drawn_proposal(kind, chance, ragged=ragged)
        drawn = chance.choices((3, 6, 9, 1), k=proposal.tokens.numel())
        target = torch.tensor(drawn).view_as(proposal.tokens)
        target = at_dropped(proposal, target, NO_TOKEN)
        walks = [certain(ids, *row) for *row, ids in kept_rows(proposal, target)]
        check(accept_greedy(proposal, target), proposal.tree, walks)
        accepted += sum(len(walk.path) - 1 for walk in walks)
    return accepted


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_device_accepts_what_the_reference_does(kind: str, ragged: bool) -> None:
    assert greedy_accepted(kind, ragged=ragged) > 100


@pytest.mark.parametrize("kind", KINDS)
def test_dropped_nodes_that_are_verified_are_caught(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Proposal, "dropped", lambda _: None)
    with pytest.raises(AssertionError):
        greedy_accepted(kind, ragged=True)


def drawn_probs(chance: random.Random, parents: Sequence[int]) -> list[float]:
    """The target's probabilities of the nodes after their parents: siblings share at most 1, some
    have all that is left, some nothing.
    """
    left: dict[int, float] = {}
    found = [0.0]
    for parent in parents[1:]:
        rest = left.get(parent, 1.0)
        found.append(rest * chance.choice((0.0, 1.0, chance.random())))
        left[parent] = rest - found[-1]
    return found


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_device_draws_what_the_reference_does(kind: str, ragged: bool) -> None:
    """Over the same random numbers, and it uses as many."""
    chance, accepted, used = random.Random(1), 0, 0
    for _ in range(300):
        proposal = drawn_proposal(kind, chance, ragged=ragged)
        float64 = partial(torch.tensor, dtype=torch.float64)
        probs = float64([drawn_probs(chance, row) for row in proposal.parents.tolist()])
        bonus = torch.tensor(chance.choices(range(50), k=probs.numel())).view_as(probs.long())
        uniform = float64([[chance.random() for _ in row] for row in probs])
        walks, draws = list[Walk](), list[int]()
        for *row, numbers in kept_rows(proposal, probs, bonus, uniform):
            source = iter(numbers)
            walks.append(accept(*row, source.__next__))
            draws.append(len(numbers) - len([*source]))
        probs = at_dropped(proposal, probs, 0)
        paths = accept_sampled(proposal.pruned(), probs, bonus, uniform)
        assert check(paths, proposal.tree, walks) == draws
        accepted += sum(len(walk.path) - 1 for walk in walks)
        used += sum(draws)
    assert accepted > 200
    assert used > 200


@pytest.mark.parametrize("guarded", [True, False])
def test_siblings_with_all_the_mass_leave_none_behind_in_spite_of_rounding(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not guarded:
        monkeypatch.setattr(reference_accept, "ROUNDING", 0.0)
        monkeypatch.setattr(accept_module, "ROUNDING", 0.0)
    probs = [0.0, 0.01, 0.41, 0.58]  # in float64, 1 - 0.01 - 0.41 is more than 0.58
    numbers, bonus = [0.99, 0.99, 1 - 2**-53, 0.0], [5, 6, 7, 8]
    tokens, parents = [9, 0, 1, 2], [-1, 0, 0, 0]
    walk = accept(tokens, parents, probs, bonus, iter(numbers).__next__)
    assert (walk.path == (0, 3)) == guarded
    proposal = proposal_of([tokens], [parents])
    float64 = torch.tensor([probs, numbers], dtype=torch.float64)[:, None]
    check(
        accept_sampled(proposal, float64[0], torch.tensor([bonus]), float64[1]),
        proposal.tree,
        [walk],
    )


def test_logits_that_are_not_finite_emit_nothing() -> None:
    logits = torch.eye(5)[None, :3].repeat(3, 1, 1)
    logits[1, 2, 0], logits[2, 0, 4] = torch.nan, torch.inf
    for tree in (Tree.from_paths([(0,), (0, 0)]), Tree.from_paths([(0,), (1,)]), Tree.root_only()):
        count = tree.num_nodes
        proposal = tree_proposal(tree, torch.tensor([[9, 0, 1][:count]] * 3))
        paths = accept_greedy(proposal, greedy_tokens(logits[:, :count]))
        found = AcceptedPaths.unpacked(paths.packed().tolist(), tree.depth)
        assert [bool(a.tokens) for a in found] == [True, count == 1, False]
